# SPDX-License-Identifier: Apache-2.0
"""Record the phases of a rank's main thread: data, forward, backward, communication, optimizer, checkpoint, evaluation.

Times are those of the host. On a device, which runs work later, each also identifies a point that the device reaches at
a time of its own (`DeviceClock`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader as torch_loader

from ddpilot.data.local_batch import LocalBatch, observers
from ddpilot.data.workers import PieceReader
from ddpilot.environments.interpreter import forget, when_imported
from ddpilot.guard.hook import install
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.parameters.steps import is_nested_step
from ddpilot.guard.probes.tensors import tensors_in
from ddpilot.launching.rank_environment import count_cores
from ddpilot.profiler.rank.buckets import Buckets, BucketTimes, DdpModels
from ddpilot.profiler.rank.device_clock import DeviceClock
from ddpilot.profiler.rank.host_reads import HostReads
from ddpilot.profiler.rank.modules import GradientEnds, OutermostModules
from ddpilot.profiler.rank.node_clocks import ClockMeasurement, name_clock
from ddpilot.profiler.rank.resources import CoreWaits, MemorySamples
from ddpilot.profiler.rank.tracing import COLLECTIVES, TraceWindow
from ddpilot.profiler.spans_file import (
    PHASES,
    PROFILE_VARIABLE,
    SYNC_BATCH_NORM,
    TRACE_VARIABLE,
    RankOptions,
    TimesWriter,
)
from ddpilot.record.hook import ring_path
from ddpilot.user_files import CodeLine

DATA, COPY, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, CHECKPOINT, EVALUATION, SYNC, SHADOW = range(len(PHASES))
OTHER = len(PHASES)
_MAX_KEPT = 2000
_NUM_FIRST = 3
"""Updates after which DDP has built its buckets, and from which on waits for cores are measured."""
_FIELDS = tuple(field.name for field in dataclasses.fields(CodeLine))


class PhaseProbe:
    """Observes what takes time in training."""

    name = "the time of updates"

    def __init__(
        self, folder: Path | None = None, rank: int | None = None, models: Iterable[DistributedDataParallel] = ()
    ) -> None:
        """`folder`, `rank`: by default those of the environment. `models`: those that were wrapped before."""
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        folder = folder or Path(os.environ[PROFILE_VARIABLE])
        self._writer = TimesWriter(folder, rank)
        self._ring = ring_path(folder, rank)
        self._models = tuple(models)
        traces = os.environ.get(TRACE_VARIABLE)
        self._options = RankOptions.from_environ(os.environ)
        self._window = TraceWindow(Path(traces), rank, self._options) if traces else None
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._spans: list[tuple[int, int, int, int]] = []
        self._updates: list[tuple[int, int]] = []
        self._memory = MemorySamples()
        self._counts: list[tuple[int, int, int, int]] = []
        self._num_updates = 0
        self._num_samples = self._num_elements = 0
        self._last_batch = (0, 0)  # samples and elements of the batch that was read last
        self._use_of_batch: Literal["none", "evaluation", "training"] = "training"
        self._of_update = (0, 0, 0, 0)  # samples, elements, wait for a core and search until the last step
        self._sites: dict[tuple[str, int], int] = {}
        self._num_open_steps = 0
        self._last_step_ns = self._update_began_ns = 0
        self._has_subgroups = False
        self._loader: Any = None
        self._batch_sizes: WeakKeyDictionary[Any, dict[int, int]] = WeakKeyDictionary()
        self._num_open_norms = 0
        self._device = DeviceClock(self._writer.write_fact) if torch.accelerator.is_available() else None
        self._now: Callable[[], int] = self._device.now if self._device is not None else time.monotonic_ns

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        self._notes = notes
        self._gradients = GradientEnds(notes, self._now)
        self._buckets = Buckets(self._writer.write_fact)
        self._bucket_times = BucketTimes(notes, self._ring, _NUM_FIRST, self._device)
        self._clock = ClockMeasurement(self._writer.write_fact)
        self._clock.start()
        self._modules = OutermostModules(notes, self._add_forward, self._now)
        self._ddp_models = DdpModels(notes, self._writer.write_fact)
        self._core_waits = CoreWaits()
        self._reads = HostReads(
            notes, self._add_read, self._number_of_site, lambda: self._num_open_steps > 0, clock=self._now
        )
        around = self._around
        for ddp in self._models:
            self._add_model(ddp, -1)
        self._models = ()
        observer = notes.safely(self._loop_batch_loaded)
        observers.append(observer)
        hooks: dict[str, Any] = {"before": self._begins, "after": self._collective_ends}
        collectives = [notes.around(dist, name, **hooks, aliases=(dist.distributed_c10d,)) for name in COLLECTIVES]
        return [
            notes.around(
                torch_loader._BaseDataLoaderIter, "__next__", before=self._begins, returned=self._batch_loaded
            ),
            around(torch_loader._BaseDataLoaderIter, "__init__", DATA),
            notes.around(torch_loader._BaseDataLoaderIter, "_next_index", returned=self._indices_drawn),
            around(torch, "save", CHECKPOINT),
            notes.around(torch.autograd, "backward", before=self._backward_begins, after=self._backward_ends),
            notes.around(DistributedDataParallel, "__init__", returned=self._wrapped),
            notes.around(DistributedDataParallel, "_match_all_reduce_for_bwd_pass", after=self._shadow_ends),
            notes.around(torch.nn.DataParallel, "__init__", returned=self._replicated),
            notes.around(torch.nn.SyncBatchNorm, "forward", before=self._norm_begins, after=self._norm_ends),
            self._ddp_models.install(),
            self._bucket_times.install(),
            *self._reads.install(),
            self._core_waits.close,
            notes.around(dist, "init_process_group", returned=self._group_made, aliases=(dist.distributed_c10d,)),
            register_optimizer_step_pre_hook(notes.safely(self._step_begins)).remove,
            register_optimizer_step_post_hook(notes.safely(self._step_ends)).remove,
            observe_steps(notes, self._step_begins, self._step_ends),
            *collectives,
            *self._modules.install(),
            self._gradients.remove,
            lambda: observers.remove(observer),
            notes.safely(self._finish),
        ]

    def _around(self, owner: Any, name: str, phase: int) -> Callable[[], None]:
        return self._notes.around(owner, name, before=self._begins, after=functools.partial(self._ends, phase))

    def _begins(self, *_args: Any, **_kwargs: Any) -> int:
        return self._now() if threading.get_ident() == self._main else 0

    def _ends(self, phase: int, begin_ns: int, *_args: Any, **_kwargs: Any) -> None:
        if begin_ns:
            self._spans.append((begin_ns, self._now(), phase, self._number_of_site()))

    def _collective_ends(self, begin_ns: int, *args: Any, **kwargs: Any) -> None:
        if self._num_open_norms and begin_ns:
            self._spans.append((begin_ns, self._now(), COMMUNICATION, self._number_of(SYNC_BATCH_NORM)))
        else:
            self._ends(COMMUNICATION, begin_ns)
        for each in (*args, *kwargs.values()):
            if isinstance(each, dist.ProcessGroup):
                self._note_group(each)

    def _note_group(self, group: Any) -> None:
        """Note that collectives of ranks cannot be matched by their order, if `group` has only some of the ranks."""
        if not self._has_subgroups and group.size() < dist.get_world_size():
            self._has_subgroups = True
            self._writer.write_fact("has_subgroups", True)

    def _batch_loaded(self, begin_ns: int, data: Any, iterator: Any) -> None:
        self._ends(DATA, begin_ns)
        if torch.is_grad_enabled() and not isinstance(iterator._dataset, PieceReader):
            sizes = self._batch_sizes.get(iterator, {})
            self._count_batch(data, sizes.pop(getattr(iterator, "_rcvd_idx", 1) - 1, None))
            if self._loader is not iterator._dataset:
                self._loader = iterator._dataset
                self._writer.write_fact("num_workers", iterator._num_workers)
                names = ("pin_memory", "prefetch_factor", "persistent_workers")  # the second one only with workers
                self._writer.write_fact("loader", {name: getattr(iterator, f"_{name}", None) for name in names})

    def _indices_drawn(self, _: None, indices: Any, iterator: Any) -> None:
        """Note how many samples a batch will have, by its number: its tensors may be images, whose first size is 3."""
        if iterator._dataset_kind == torch_loader._DatasetKind.Map and isinstance(indices, (list, tuple)):
            self._batch_sizes.setdefault(iterator, {})[getattr(iterator, "_send_idx", 0)] = len(indices)

    def _count_batch(self, data: Any, num_samples: int | None) -> None:
        """Count samples and elements. `num_samples`: None for the number of rows, where all tensors have as many."""
        rows, num_elements = set(), 0
        for _, tensor in tensors_in(data):
            num_elements += tensor.numel()
            if tensor.dim():
                rows.add(tensor.shape[0])
        if num_samples is None:
            num_samples = rows.pop() if len(rows) == 1 else 0
        self._last_batch, self._use_of_batch = (num_samples, num_elements), "none"
        self._add_last_batch(1)

    def _add_last_batch(self, sign: int) -> None:
        self._num_samples += sign * self._last_batch[0]
        self._num_elements += sign * self._last_batch[1]

    def _use_batch(self, is_training: bool) -> None:
        """Do not count the last batch if it is only evaluated: a validation loader may be read with gradients on.

        It is counted again if it is trained on after that, as with a teacher's output.
        """
        if is_training and self._use_of_batch == "evaluation":
            self._add_last_batch(1)
        elif not is_training and self._use_of_batch == "none":
            self._add_last_batch(-1)
        if self._use_of_batch != "training":
            self._use_of_batch = "training" if is_training else "evaluation"

    def _loop_batch_loaded(self, batch: LocalBatch, begin_ns: int, end_ns: int) -> None:
        """A `Loop` has read a batch, with or without a DataLoader of torch inside."""
        self._spans.append((begin_ns, end_ns, DATA, self._number_of_site()))
        if torch.is_grad_enabled():
            self._count_batch(batch.data, batch.count)

    def _add_forward(self, begin_ns: int, end_ns: int) -> None:
        phase = FORWARD if torch.is_grad_enabled() else EVALUATION
        self._use_batch(phase == FORWARD)
        self._spans.append((begin_ns, end_ns, phase, self._number_of_site()))

    def _add_read(self, begin_ns: int, end_ns: int, is_copy: bool) -> None:
        self._spans.append((begin_ns, end_ns, COPY if is_copy else SYNC, self._number_of_site()))

    def _backward_begins(self, *_args: Any, **_kwargs: Any) -> int:
        if self._last_step_ns:
            self._end_update()
        self._use_batch(is_training=True)
        self._gradients.begin()
        return self._now()

    def _backward_ends(self, begin_ns: int, *_args: Any, **_kwargs: Any) -> None:
        end_ns = self._now()
        ready_ns, reduced = self._gradients.end()
        if ready_ns > begin_ns:
            self._spans.append((ready_ns, end_ns, COMMUNICATION, -1))
        self._ddp_models.reduced(reduced)
        self._spans.append((begin_ns, end_ns, BACKWARD, self._number_of_site()))

    def _step_begins(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_nested = self._num_open_steps > 0 and is_nested_step()  # an open step may have ended with an error
        self._num_open_steps = self._num_open_steps + 1 if is_nested else 1
        if is_nested:
            return None
        self._step_began_ns = self._now()
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._time_closure(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # the first one is the optimizer
            return (args[0], self._time_closure(args[1]), *args[2:]), kwargs
        return None

    def _time_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return `closure` as a function whose time is not the optimizer's."""

        @functools.wraps(closure)
        def timed(*args: Any, **kwargs: Any) -> Any:
            num_open, self._num_open_steps = self._num_open_steps, 0
            begin_ns = self._now()
            try:
                return closure(*args, **kwargs)
            finally:
                self._spans.append((begin_ns, self._now(), OTHER, -1))
                self._num_open_steps = num_open

        return timed

    def _step_ends(self, *_: Any) -> None:
        self._num_open_steps = max(0, self._num_open_steps - 1)
        if not self._num_open_steps:
            self._last_step_ns = self._now()
            waited_ns = self._of_update[2] + self._core_waits.take_ns()
            self._of_update = self._num_samples, self._num_elements, waited_ns, self._ddp_models.search_ns
            self._spans.append((self._step_began_ns, self._last_step_ns, OPTIMIZER, self._number_of_site()))

    def _shadow_ends(self, *_: Any) -> None:
        """This rank has no batches left, and has matched the collectives of the others' update within `Join`.

        That is an update of its own, so that its later ones remain those of the other ranks.
        """
        if self._last_step_ns:
            self._end_update()
        if not self._update_began_ns:
            return
        begin_ns, now_ns = self._update_began_ns, self._now()
        while self._spans and self._spans[-1][0] >= begin_ns:
            self._spans.pop()
        self._spans.append((begin_ns, now_ns, SHADOW, -1))
        self._last_step_ns = now_ns

    def _end_update(self) -> None:
        """End the update with the last step; what was counted since then belongs to the next one."""
        window = self._window
        self._update_began_ns = self._last_step_ns
        num_samples, num_elements, waited_ns, search_ns = self._of_update
        self._updates.append((self._last_step_ns, -1 if window and window.is_recording else num_samples))
        self._counts.append((num_elements, self._gradients.take_reductions(), waited_ns, search_ns))
        self._memory.sample(self._last_step_ns)
        self._num_updates += 1
        self._num_samples -= num_samples
        self._num_elements -= num_elements
        self._ddp_models.search_ns -= search_ns
        self._of_update = (0, 0, 0, 0)
        if self._num_updates == _NUM_FIRST:
            self._ddp_models.write()
            self._core_waits.begin()
        if window is not None:
            window.end_update()
        self._buckets.end_update()
        self._bucket_times.end_update()
        if self._device is not None:
            self._device.end_update()
        self._last_step_ns = 0
        self._modules.is_first = False
        if len(self._spans) > _MAX_KEPT:
            self._write()

    def _number_of_site(self) -> int:
        frame = self._notes.user_frame()
        if frame is None:
            return -1
        key = (frame.f_code.co_filename, frame.f_lineno)
        number = self._sites.get(key)
        if number is None:
            site = self._notes.site(frame)
            number = self._number_of(CodeLine(*(site.get(name, "") for name in _FIELDS)), key)
        return number

    def _number_of(self, line: CodeLine, key: tuple[str, int] = ("", 0)) -> int:
        number = self._sites.get(key)
        if number is None:
            number = self._sites[key] = len(self._sites)
            self._writer.write_fact("site", [number, *(getattr(line, name) for name in _FIELDS)])
        return number

    def _group_made(self, *_args: Any, **_kwargs: Any) -> None:
        self._clock.start()

    def _wrapped(self, _: None, __: None, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
        self._add_model(ddp, self._number_of_site())

    def _add_model(self, ddp: Any, site: int) -> None:
        """Observe a DDP model. `site`: the number of the line that creates it."""
        self._gradients.add(ddp)
        if self._device is not None:
            self._device.start(next(ddp.module.parameters()).device)
        self._note_group(ddp.process_group)
        self._ddp_models.add(ddp, site)
        self._buckets.add(ddp, measures=self._options.measures_group)

    def _replicated(self, _: None, __: None, model: Any, *_args: Any, **_kwargs: Any) -> None:
        self._writer.write_fact("data_parallel", [len(model.device_ids), self._number_of_site()])

    def _norm_begins(self, *_args: Any, **_kwargs: Any) -> None:
        self._num_open_norms += 1

    def _norm_ends(self, *_args: Any, **_kwargs: Any) -> None:
        self._num_open_norms -= 1

    def _finish(self) -> None:
        if os.getpid() != self._pid:
            return
        if self._last_step_ns:
            self._end_update()
        if self._window is not None:
            self._window.stop()
            self._writer.write_fact("trace_slow_down", self._window.slow_down)
        self._ddp_models.write_unused()
        self._writer.write_fact("short_reads", self._reads.totals())
        self._writer.write_fact("core_wait_share", self._core_waits.longest_share())
        self._buckets.read()
        self._clock.finish()
        self._writer.write_fact("clock", name_clock())
        self._writer.write_fact("num_threads", torch.get_num_threads())
        self._writer.write_fact("num_cores", count_cores())
        self._writer.write_fact("world_size", int(os.environ.get("WORLD_SIZE", "1")))
        self._writer.write_fact("local_world_size", int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._writer.write_fact("uses_device", torch.accelerator.is_available())
        self._writer.write_fact("num_devices", torch.accelerator.device_count())
        if self._device is not None:
            self._device.finish()
        self._write()

    def _write(self) -> None:
        self._writer.write_spans(self._spans)
        self._writer.write_updates(self._updates)
        self._writer.write_memory(self._memory.take())
        self._writer.write_counts(self._counts)
        self._writer.write_buckets(self._bucket_times.take())
        if self._device is not None:
            self._writer.write_marks(self._device.take())
        self._spans, self._updates, self._counts = [], [], []


def start_recording(folder: Path, rank: int, models: Iterable[DistributedDataParallel]) -> Callable[[], None]:
    """Record the time of updates into `folder` until the function that is returned is called.

    `models`: those that exist already.
    """
    make_probe = functools.partial(PhaseProbe, folder, rank, models)
    functools.update_wrapper(make_probe, PhaseProbe, updated=())
    return install(folder / f"rank{rank}.journal", rank=rank, probes=(make_probe,))


_MODULE, _KEY = "fastai.optimizer", "time of updates"


def observe_steps(notes: Notes, begins: Callable[..., Any], ends: Callable[..., Any]) -> Callable[[], None]:
    """Call `begins` and `ends` as torch's hooks around each step, once fastai is imported. Returns an undo function."""
    undo: list[Callable[[], None]] = []

    def before(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        begins(optimizer, args, kwargs)

    def after(_ticket: None, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        ends(optimizer, args, kwargs)

    def install(module: ModuleType) -> None:
        undo.append(notes.around(module.Optimizer, "step", before=before, after=after))

    def remove() -> None:
        forget(_MODULE, _KEY)
        while undo:
            undo.pop()()

    when_imported(_MODULE, _KEY, install)
    return remove
