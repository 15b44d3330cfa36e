# SPDX-License-Identifier: Apache-2.0
"""Choose from a profile the options that could make the script faster, and which of them NCCL reads. No torch."""

from __future__ import annotations

import mmap
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddpilot.launching.elastic.rendezvous.network import GLOO_VARIABLE
from ddpilot.profiler.judgements.judged import Judged
from ddpilot.profiler.phases import COMMUNICATION, Phases
from ddpilot.profiler.rank.overrides import Call
from ddpilot.profiler.tuning.options import Option

KNOWN_FROM_THE_WEB = (
    *("NCCL_TIMEOUT", "NCCL_SOCKET_TIMEOUT", "NCCL_BUFFER_SIZE", "NCCL_MAX_RINGS", "NCCL_NUM_CHANNELS"),
    *("NCCL_TREE_THRESHOLD", "NCCL_LL_THRESHOLD", "NCCL_IFNAME", "NCCL_IB_RETRY", "NCCL_IB_CUDA_SUPPORT"),
)
"""Names from forums, guides and old documentation. The installed library shows which of them have no effect."""
_OF_TORCH = (
    *("NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING"),
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)
"""Names that torch reads itself, as older spellings of those that begin with TORCH_NCCL_."""
_BEGIN = b"\0NCCL_"
_NAME = re.compile(rb"\x00(NCCL_[A-Z0-9_]{2,60})\x00")
_LIBRARIES = (("nvidia.nccl", "lib"), ("torch", "lib"))
_FILES = ("libnccl.so.2", "libnccl.so", "librccl.so.1", "librccl.so", "libtorch_cuda.so")
"""The last one contains NCCL if it is linked statically."""


def find_library() -> Path | None:
    """Return the library with NCCL that torch uses; None if there is none, as with a torch for CPUs."""
    folders = [Path(path) / below for package, below in _LIBRARIES for path in _folders_of(package)]
    return next((folder / name for folder in folders for name in _FILES if (folder / name).is_file()), None)


def _folders_of(package: str) -> list[str]:
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # no package around it
        return []
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def read_names(library: Path) -> frozenset[str]:
    """Return the names of variables in `library`: NCCL passes each of them to `getenv` as a whole string."""
    found = set()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = data.find(_BEGIN)
        while place >= 0:
            match = _NAME.match(data, place)
            if match is not None:
                found.add(match[1].decode())
            place = data.find(_BEGIN, place + 1)
    return frozenset(found)


def describe_unknown(names: frozenset[str], environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable of NCCL in `environ` that does nothing, and one about well-known names.

    `names`: those that the installed NCCL knows.
    """
    found = []
    for name in sorted(environ):
        if not name.startswith("NCCL_") or name in names:
            continue
        if name in _OF_TORCH:
            found.append(f"{name} is not read by NCCL; torch reads it as TORCH_{name}")
        else:
            found.append(f"{name}={environ[name]} does nothing: the installed NCCL does not know the name")
    absent = ", ".join(name for name in KNOWN_FROM_THE_WEB if name not in names)
    if absent:
        found.append(f"names that are recommended here and there and do nothing in the installed NCCL: {absent}")
    return found


DATA_SHARE = 0.05
"""Part of an update that a rank has to wait for data before workers are tried."""
EXPOSED_SHARE = 0.05
"""Part of an update that has to be exposed communication before buckets are tried."""
_ADVISED_SHARE = 0.30
_COPY_SHARE = 0.02
_COPIED_BYTES_PER_S = {False: 4e9, True: 400e9}
"""About what a core, or a device, copies in a second."""
_BUCKETS_MB = (10, 25, 50, 100)
_FIRST_BUCKET_MB = 1
_NUM_WORKERS = (1, 2, 4)
_MOST_WORKERS = 8
_NCCL = (("NCCL_ALGO", "Ring"), ("NCCL_ALGO", "Tree"), ("NCCL_MIN_NCHANNELS", "16"), ("NCCL_BUFFSIZE", "8388608"))
"""Settings of NCCL that change how gradients are exchanged, and that cannot give wrong results."""
_AUGMENTED = "may change random augmentation: each worker draws from a random state of its own"
_STATIC = "right only if every update uses the same parameters in the same way"
_UNUSED = "an update that leaves a parameter out then ends with an error"
_COMPRESSED = "changes the numbers: gradients are exchanged with fewer bits"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The options to try, and notes on those that are not tried."""

    options: tuple[Option, ...]
    advice: tuple[str, ...]
    """Sentences about what was seen and cannot be tried without changing what is computed."""


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """The profile of the unchanged script."""

    phases: Phases
    facts: Mapping[str, Any]
    """Facts that rank 0 has recorded about the program."""
    calls: Sequence[Call]
    nccl_names: Collection[str] = ()
    """The variables that the installed NCCL knows; none if there is no NCCL."""
    environ: Mapping[str, str]
    judged: Sequence[Judged] = ()
    """Findings of the profile with their estimates, which the trials check."""
    interfaces: Sequence[str] = ()
    """Network interfaces of this machine that gloo can use; the first is the one that it uses now."""

    def find(self, code: str) -> Judged | None:
        """Return the finding `code` of the profile; None if there is none."""
        return next((each for each in self.judged if each.finding.code == code), None)

    @property
    def update_s(self) -> float:
        """Mean duration of an update."""
        return float(self.phases.durations_s.mean())

    @property
    def data_s(self) -> float:
        """Seconds of an update that the rank that waits longest for data waits for it."""
        return float(self.phases.share("data").mean(axis=1).max())

    @property
    def exposed_s(self) -> float:
        """Seconds of an update that wait for gradients to be exchanged, without the collectives of the script."""
        called_s = sum(seconds for (phase, _), seconds in self.phases.by_site.items() if phase == COMMUNICATION)
        return max(0.0, self.phases.median("communication") - called_s)

    def calls_of(self, kind: str) -> list[Call]:
        """Return the calls of one kind, of which the last one counts if a line has made several."""
        return list({call.line.position: call for call in self.calls if call.kind == kind}.values())


def choose_options(profiled: Profiled, *, compression: bool = False) -> Choice:
    """Return the options that could help. `compression`: also exchange gradients in fewer bits."""
    advice: list[str] = []
    options = [
        *_choose_workers(profiled, advice),
        *_choose_pinning(profiled),
        *_choose_threads(profiled),
        *_choose_ddp(profiled),
        *_choose_exchange(profiled, advice, compression),
    ]
    return Choice(options=tuple(options), advice=tuple(advice))


def _choose_workers(profiled: Profiled, advice: list[str]) -> Iterator[Option]:
    if profiled.data_s < DATA_SHARE * profiled.update_s:
        return
    why = f"updates wait {_ms(profiled.data_s)} of {_ms(profiled.update_s)} for data"
    loaders = [call for call in profiled.calls_of("loader") if call.num_passes or call.values["is_of_loop"]]
    if not loaders:
        advice.append(f"{why}, but not from a DataLoader: load the next batch in a thread or a process of its own")
        return
    if any(call.values["is_iterable"] and not call.values["is_of_loop"] for call in loaders):
        advice.append(
            f"{why}; workers were not tried, since each would read all of an IterableDataset that does not divide "
            "itself by `torch.utils.data.get_worker_info()`"
        )
        return
    now = loaders[0].values
    common: dict[str, Any] = {"kind": "loader", "why": why, "lines": tuple(call.line for call in loaders)}
    repeats = max(call.num_passes for call in loaders) > 1
    for number in _worker_numbers(now["num_workers"], profiled.facts):
        also = {"persistent_workers": True} if repeats and not now["persistent_workers"] else {}
        values = {"name": "num_workers", "value": number, "before": now["num_workers"]}
        yield Option(**common, **values, also=also, warning=_AUGMENTED, code="DDP721")
    if now["num_workers"]:
        values = {"name": "prefetch_factor", "value": 2 * now["prefetch_factor"], "before": now["prefetch_factor"]}
        yield Option(**common, **values, code="DDP753")
        if repeats and not now["persistent_workers"]:
            warning = "workers keep their random state from one epoch to the next"
            yield Option(**common, name="persistent_workers", value=True, before=False, warning=warning)


def _choose_pinning(profiled: Profiled) -> Iterator[Option]:
    """Choose pinned memory where updates wait for data, or for copies of them to the device."""
    copies_s = float(profiled.phases.share("copy").mean())
    is_long = max(profiled.data_s, copies_s) >= DATA_SHARE * profiled.update_s
    loaders = [call for call in profiled.calls_of("loader") if call.num_passes or call.values["is_of_loop"]]
    if not profiled.facts.get("uses_device") or not is_long or not loaders or loaders[0].values["pin_memory"]:
        return
    yield Option(
        kind="loader",
        name="pin_memory",
        value=True,
        before=False,
        why=f"updates wait {_ms(profiled.data_s)} of {_ms(profiled.update_s)} for data, and {_ms(copies_s)} for copies",
        code="DDP752",
        lines=tuple(call.line for call in loaders),
    )


def _worker_numbers(now: int, facts: Mapping[str, Any]) -> list[int]:
    """Return the numbers of workers to try: more than now, and fewer if those of now do not have cores."""
    cores, num_ranks = facts.get("num_cores", 1), facts.get("local_world_size", 1)
    most = max(max(_NUM_WORKERS), min(_MOST_WORKERS, cores // num_ranks))
    if not now:
        return sorted({*_NUM_WORKERS, most})
    fewer = {now // 2} if now > 1 and now * num_ranks > cores else set()
    return sorted(fewer | {number for number in (2 * now, 4 * now) if number <= max(most, 2 * now)})


def _choose_threads(profiled: Profiled) -> Iterator[Option]:
    facts = profiled.facts
    threads, cores, num_ranks = (facts.get(name, 0) for name in ("num_threads", "num_cores", "local_world_size"))
    if facts.get("uses_device") or not (threads and cores and num_ranks):
        return
    fair = max(1, cores // num_ranks)
    numbers = {fair, 1} if threads * num_ranks > cores else {fair}
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)} with {threads} thread{'s' * (threads > 1)} each"
    calls = profiled.calls_of("threads")
    for number in sorted(numbers - {threads}, reverse=True):
        yield Option(
            kind="threads",
            name="OMP_NUM_THREADS",
            value=number,
            before=threads,
            why=f"{ranks} share {cores} cores",
            code="DDP804" if threads * num_ranks > cores else "",
            lines=tuple(call.line for call in calls),
        )


def _choose_ddp(profiled: Profiled) -> Iterator[Option]:
    calls = profiled.calls_of("ddp")
    if not calls:
        return
    now, lines = calls[-1].values, tuple(call.line for call in calls)
    common: dict[str, Any]
    if now["find_unused_parameters"] and not now["static_graph"]:
        why = "DDP looks for unused parameters in each forward pass"
        common = {"kind": "ddp", "why": why, "lines": lines}
        yield Option(**common, name="find_unused_parameters", value=False, before=True, warning=_UNUSED, code="DDP742")
        yield Option(**common, name="static_graph", value=True, before=False, warning=_STATIC, code="DDP742")
    num_bytes = (profiled.facts.get("ddp") or {}).get("parameter_bytes", 0)
    copies_s = 2 * num_bytes / _COPIED_BYTES_PER_S[bool(profiled.facts.get("uses_device"))]
    if not now["gradient_as_bucket_view"] and copies_s >= _COPY_SHARE * profiled.update_s:
        why = f"{num_bytes / 1e6:.3g} MB of gradients are copied into buckets and back in each update"
        common = {"kind": "ddp", "why": why, "lines": lines, "code": "DDP744"}
        yield Option(**common, name="gradient_as_bucket_view", value=True, before=False)


def _choose_exchange(profiled: Profiled, advice: list[str], compression: bool) -> Iterator[Option]:
    ddp, calls = profiled.facts.get("ddp"), profiled.calls_of("ddp")
    exposed_s, update_s = profiled.exposed_s, profiled.update_s
    if not ddp or not calls or len(profiled.phases.ranks) < 2 or exposed_s < EXPOSED_SHARE * update_s:
        return
    why = f"updates wait {_ms(exposed_s)} of {_ms(update_s)} for gradients to be exchanged"
    now, lines = calls[-1].values, tuple(call.line for call in calls)
    code = "DDP743" if profiled.find("DDP743") else "DDP723"
    common: dict[str, Any] = {"why": why, "lines": lines, "code": code}
    is_default = bool(now.get("has_small_first_bucket"))
    for size in _bucket_sizes(ddp["parameter_bytes"] / 2**20, now["bucket_cap_mb"], is_default=is_default):
        yield Option(**common, kind="ddp", name="bucket_cap_mb", value=size, before=now["bucket_cap_mb"])
    if compression:
        for name in ("bf16", "fp16") if ddp["backend"] != "gloo" else ("fp16",):  # torch's hook of bf16 refuses gloo
            yield Option(**common, kind="compression", name="compression", value=name, warning=_COMPRESSED)
    if ddp["backend"] == "nccl":
        for name, value in _NCCL:
            if name in profiled.nccl_names and name not in profiled.environ:
                yield Option(kind="environment", name=name, value=value, why=why)
    if ddp["backend"] == "gloo" and exposed_s >= _ADVISED_SHARE * update_s:
        for name in profiled.interfaces[1:]:
            yield Option(kind="environment", name=GLOO_VARIABLE, value=name, before=profiled.interfaces[0], why=why)
    small = profiled.find("DDP747")
    if small is not None:
        finding = small.finding
        advice.append(
            f"{finding.summary}: {finding.evidence[1]}. By the profile's estimate that trains on {small.factor:.2f}x "
            "the samples in a second; not tried, since an update then has more samples"
        )
    elif exposed_s >= _ADVISED_SHARE * update_s:
        factor = update_s / (update_s - exposed_s / 2)
        advice.append(
            f"{why}: accumulating 2 batches with `no_sync()`, or batches twice as large (`ddpilot.find_batch_size` "
            f"finds the largest), would train on about {factor:.2f}x the samples in a second; not tried, since "
            "an update then has more samples"
        )


def _bucket_sizes(model_mb: float, now_mb: float, *, is_default: bool) -> list[int]:
    """Return the sizes that divide the gradients in a different way than now; of those that hold all, the smallest.

    `is_default`: the first bucket is smaller than the others, as it is if the script gives no size.
    """
    if is_default and model_mb <= _FIRST_BUCKET_MB:
        return []
    sizes = [size for size in _BUCKETS_MB if size < model_mb]
    sizes += [size for size in _BUCKETS_MB if size >= model_mb][:1]
    holds_all = now_mb >= model_mb and not is_default
    return [size for size in sizes if not (holds_all if size >= model_mb else size == now_mb)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
