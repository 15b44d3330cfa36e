# SPDX-License-Identifier: Apache-2.0
"""The set-up checklist: each point ok, wrong with its line, or not seen, from `ddpilot lint` and the runs together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ddpilot.diagnose.ladder.result import Item, Rung
from ddpilot.diagnose.ladder.sources import Sources
from ddpilot.diagnose.updates.record import RankRecord, Saved
from ddpilot.diagnose.verify.causes import line_at
from ddpilot.diagnose.verify.differences import count_samples
from ddpilot.diagnose.verify.target import Run
from ddpilot.findings.catalog import find_entry
from ddpilot.findings.finding import Finding
from ddpilot.module_names import INIT_GROUP, LAUNCH
from ddpilot.user_files import CodeLine

Seen = str | CodeLine | None
"""Evidence that a point is right: a sentence, or a line of the program; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Sources and recorded runs, from which each point is judged."""

    sources: Sources
    rungs: Sequence[Rung]
    run: Run | None
    """The run on several ranks, or else the one as one process; None if there is none."""
    findings: Sequence[Finding] = field(default=())
    """Findings of all runs."""

    def is_ok(self, letter: str) -> bool:
        """Return True if the rung was reached and is ok."""
        return any(rung.letter == letter and rung.status == "ok" for rung in self.rungs)

    @cached_property
    def records(self) -> tuple[RankRecord, ...]:
        """Records of all ranks; empty if only one process ran."""
        return self.run.ranks if self.run is not None and self.run.nproc_per_node > 1 else ()

    @cached_property
    def saved(self) -> list[tuple[int, Saved]]:
        """Files that ranks have written, with the rank."""
        return [(record.rank, each) for record in self.records for each in record.program.saved]

    def find_call(self, *names: str) -> CodeLine | None:
        """Return the first line of the program that calls one of `names`."""
        return self.sources.find_call(*names)


@dataclass(frozen=True)
class _Point:
    section: str
    name: str
    codes: tuple[str, ...]
    """Findings of lint, watch, guard and the rungs by which it is wrong."""
    seen: Callable[[Evidence], Seen]


def _group(e: Evidence) -> Seen:
    records = [record for record in e.records if record.program.backend]
    if not records or len(records) < len(e.records):
        return None
    first = records[0].program
    backends = dict.fromkeys(each.partition(":")[2] or each for each in first.backend.split(","))
    return f"{first.world_size} ranks over {', '.join(backends)}"


def _devices(e: Evidence) -> Seen:
    devices = [record.program.device for record in e.records if record.program.num_placed]
    if not devices or len(devices) < len(e.records):
        return None
    return "the CPU on each rank" if set(devices) == {"cpu"} else ", ".join(devices)


def _start(e: Evidence) -> Seen:
    spawned = e.find_call(
        "torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", LAUNCH.replace(":", ".")
    )
    return e.sources.find_main_guard() or spawned


def _placed(e: Evidence) -> Seen:
    if not e.records or not e.is_ok("d"):
        return None
    return f"{sum(e.records[0].program.num_placed.values())} tensors of the first batch"


def _wrapped(e: Evidence) -> Seen:
    if not e.records or not e.is_ok("e"):
        return None
    known = e.records[0].parameters.values()
    num = sum(each.in_ddp for each in known)
    if num == len(known):
        return f"all {num} parameters by DistributedDataParallel"
    return f"{num} of {len(known)} parameters by DistributedDataParallel; the gradients of all are equal"


def _start_values(e: Evidence) -> Seen:
    return "equal before the first update" if e.records and e.is_ok("e") else None


def _batch_norm(e: Evidence) -> Seen:
    return e.find_call("torch.nn.SyncBatchNorm.convert_sync_batchnorm", "torch.nn.SyncBatchNorm")


def _divided(e: Evidence) -> Seen:
    if not e.records or not e.is_ok("e") or e.run is None:
        return None
    counted = count_samples(e.run, 0)
    if not counted.total:
        return "the ranks' models got other inputs"
    return f"{' and '.join(map(str, counted.by_rank))} samples in the first update"


def _epochs(e: Evidence) -> Seen:
    if any(record.program.num_epochs_set for record in e.records):
        return "set_epoch was called"
    return e.find_call(".set_epoch")


def _draws(e: Evidence) -> Seen:
    states = [record.updates[0].generators for record in e.records if record.updates]
    if len(states) < 2 or any(len({each[name] for each in states}) < len(states) for name in states[0]):
        return None
    return "each rank's generators have a state of their own"


def _collectives(e: Evidence) -> Seen:
    if not e.records or e.run is None or e.run.error is not None or not e.run.num_updates:
        return None
    return f"{e.run.num_updates} update{'s' * (e.run.num_updates > 1)} on each of {len(e.records)} ranks"


def _gradients(e: Evidence) -> Seen:
    return "the same on all ranks" if e.is_ok("e") else None


def _numbers(e: Evidence) -> Seen:
    return "those of one process" if e.is_ok("f") else None


def _precision(e: Evidence) -> Seen:
    return e.find_call("torch.amp.GradScaler", "torch.amp.autocast", "torch.autocast", "torch.cuda.amp.GradScaler")


def _metrics(e: Evidence) -> Seen:
    reductions = ("all_reduce", "reduce", "all_gather", "gather", "all_gather_object", "gather_object")
    return e.find_call(*(f"torch.distributed.{name}" for name in reductions))


def _written(e: Evidence) -> Seen:
    if e.saved:
        return f"by rank {e.saved[0][0]}" if len({rank for rank, _ in e.saved}) == 1 else "each rank its own file"
    return e.find_call("torch.save", "torch.distributed.checkpoint.save")


def _prefix(e: Evidence) -> Seen:
    if e.saved:
        return "names of the model itself"
    return e.find_call(".state_dict") if e.find_call("torch.save") else None


def _loaded(e: Evidence) -> Seen:
    return e.find_call("torch.load", "torch.distributed.checkpoint.load")


def _left(e: Evidence) -> Seen:
    programs = [record.program for record in e.records if record.program.backend]
    if programs and all(each.has_left_group for each in programs):
        return "no rank ended with a group"
    return e.find_call("torch.distributed.destroy_process_group", INIT_GROUP.replace(":", "."))


_GROUP_CODES = tuple(f"DDP{number}" for number in (*range(101, 111), 117, 120, 121, 802, 808))
_COLLECTIVE_CODES = tuple(f"DDP{number}" for number in (*range(201, 216), *range(217, 224), 314))
POINTS = (
    _Point("before training", "ranks form one group", _GROUP_CODES, _group),
    _Point("before training", "each rank has its device", ("DDP118", "DDP119", "DDP803"), _devices),
    _Point("before training", "ranks can be started", ("DDP111", "DDP112", "DDP113", "DDP114", "DDP115"), _start),
    _Point("model", "tensors on the rank's device", ("DDP412", "DDP331"), _placed),
    _Point(
        "model",
        "gradients are exchanged",
        ("DDP301", "DDP302", "DDP303", "DDP305", "DDP306", "DDP310", "DDP321", "DDP324", "DDP330", "DDP332", "DDP334"),
        _wrapped,
    ),
    _Point("model", "equal parameters at the start", ("DDP304", "DDP325", "DDP327", "DDP821"), _start_values),
    _Point("model", "batch norm over all ranks", ("DDP307", "DDP408", "DDP501", "DDP506"), _batch_norm),
    _Point(
        "data",
        "divided among the ranks",
        ("DDP401", "DDP403", "DDP404", "DDP413", "DDP415", "DDP416", "DDP822"),
        _divided,
    ),
    _Point("data", "other order in each epoch", ("DDP402",), _epochs),
    _Point("data", "other random numbers per rank", ("DDP407",), _draws),
    _Point("loop", "same collectives on all ranks", _COLLECTIVE_CODES, _collectives),
    _Point(
        "loop",
        "gradients at the step",
        ("DDP308", "DDP311", "DDP313", "DDP320", "DDP322", "DDP323", "DDP326", "DDP328", "DDP329", "DDP505"),
        _gradients,
    ),
    _Point("loop", "numbers", ("DDP406", "DDP409", "DDP820", "DDP823", "DDP824", "DDP826"), _numbers),
    _Point("loop", "mixed precision", ("DDP335", "DDP336"), _precision),
    _Point("loop", "metrics over all ranks", ("DDP405", "DDP410", "DDP411", "DDP825"), _metrics),
    _Point("checkpoints", "one rank writes a file", ("DDP603", "DDP806"), _written),
    _Point("checkpoints", "names without a prefix", ("DDP602",), _prefix),
    _Point("checkpoints", "loaded on the rank's device", ("DDP608", "DDP609"), _loaded),
    _Point("clean-up", "process group destroyed", ("DDP216", "DDP605"), _left),
)
"""Every point, in the order in which they are shown."""


def make_checklist(evidence: Evidence) -> tuple[Item, ...]:
    """Return the checklist. A fault comes before evidence that a point is right."""
    return tuple(_find_wrong(point, evidence) or _find_seen(point, evidence) for point in POINTS)


def _find_wrong(point: _Point, e: Evidence) -> Item | None:
    for finding in e.findings:
        if finding.code in point.codes and finding.severity != "info":
            return _wrong(point, finding.code, finding.summary, finding.place)
    for lint in e.sources.findings:
        if lint.code in point.codes and find_entry(lint.code).severity != "info":
            return _wrong(point, lint.code, lint.message, lint.place)
    for rank, saved in e.saved:
        if "DDP602" in point.codes and saved.has_prefix:
            return _wrong(point, "DDP602", "names begin with `module.`", line_at(saved.site))
        shared = [other for other, each in e.saved if each.path == saved.path and other != rank]
        if "DDP603" in point.codes and shared:
            return _wrong(point, "DDP603", f"ranks {rank} and {shared[0]} write {saved.path}", line_at(saved.site))
    return None


def _wrong(point: _Point, code: str, text: str, place: CodeLine | None) -> Item:
    return Item(section=point.section, name=point.name, status="wrong", evidence=text, code=code, place=place)


def _find_seen(point: _Point, e: Evidence) -> Item:
    seen = point.seen(e)
    if seen is None:
        return Item(section=point.section, name=point.name, status="not seen")
    if isinstance(seen, CodeLine):
        return Item(section=point.section, name=point.name, status="ok", evidence=seen.text, place=seen)
    return Item(section=point.section, name=point.name, status="ok", evidence=seen)
