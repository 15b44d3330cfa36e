# SPDX-License-Identifier: Apache-2.0
"""Interface of probes, the types of their notes, and their access to the journal.

Each note is a journal entry: `NOTES` maps its kind to the fields that the probe writes and the rules read. An error in
a probe never reaches training. Does not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

from ddpilot.record.call_sites import SiteFinder, describe_site
from ddpilot.record.journal import JournalWriter

WRAPPER_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "<importlib._bootstrap>")
"""File name in the code of wrappers. Python skips the frames of its import system, which it recognizes by
"importlib" and "_bootstrap" in their file name, when it looks for the line that a warning with a `stacklevel` above
1 refers to; `logging` does so since 3.11. Thus torch's warnings name the user's line, as without guard."""

Hook = Callable[..., Any]


class Hooks(NamedTuple):
    """The hooks of one probe around a function."""

    notes: Notes
    before: Hook | None
    returned: Hook | None
    raised: Hook | None


class FunctionWrapper:
    """The only wrapper of `owner.name`, shared by all probes, as each further wrapper would cost time in every call.

    Hooks run as if each probe had wrapped the function in turn: the newest first before the call, and last after it.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self._name = name
        self._original = getattr(owner, name)
        self._places: list[Any] = []
        self._hooks: tuple[Hooks, ...] = ()
        self.wrapper = self._make()

    def add(self, hooks: Hooks, aliases: Sequence[Any]) -> Callable[[], None]:
        """Call `hooks` too. Returns a function that removes them."""
        self._hooks = (hooks, *self._hooks)
        for one in (self.owner, *aliases):
            if getattr(one, self._name, None) is self._original:
                setattr(one, self._name, self.wrapper)
                self._places.append(one)

        def undo() -> None:
            self._hooks = tuple(each for each in self._hooks if each is not hooks)
            while not self._hooks and self._places:
                one = self._places.pop()
                if getattr(one, self._name, None) is self.wrapper:  # other code may have wrapped it since
                    setattr(one, self._name, self._original)

        return undo

    def _make(self) -> Any:
        from torch._C._dynamo.eval_frame import set_eval_frame as set_compiler

        original = self._original

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            hooks = self._hooks
            tickets: list[Any] = []
            # Inside a compiled function, torch.compile would trace what is called from here.
            compiler = set_compiler(None)
            try:
                for notes, before, _, _ in hooks:
                    ticket = None
                    if before is not None and not notes.is_off:
                        try:
                            ticket = before(*args, **kwargs)
                        except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
                            notes.switch_off(error)
                    tickets.append(ticket)
            finally:
                set_compiler(compiler)
            result, returned = None, False
            try:
                result = original(*args, **kwargs)
                returned = True
            finally:
                compiler = set_compiler(None)
                try:
                    for notes, _, after, raised in reversed(hooks):
                        ticket = tickets.pop()
                        if not returned:
                            after = raised
                        if after is not None and not notes.is_off:
                            try:
                                after(ticket, returned, result, *args, **kwargs)
                            except Exception as error:  # noqa: BLE001 - as above
                                notes.switch_off(error)
                finally:
                    set_compiler(compiler)
            return result

        wrapper.__code__ = wrapper.__code__.replace(co_filename=WRAPPER_FILE)  # type: ignore[attr-defined]
        keep_dynamo_out(wrapper)
        wrapper._ddpilot_wrapping = self  # type: ignore[attr-defined]
        return wrapper


def keep_dynamo_out(function: Any) -> None:
    """Let torch.compile neither compile nor trace `function`."""
    import torch

    function._torchdynamo_disable = True
    eval_frame: Any = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        action = eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    else:  # torch 2.6 and 2.7
        eval_frame.skip_code(function.__code__)


class Probe(Protocol):
    """Observes one aspect of training; created without arguments. Never issues a collective nor changes a value."""

    name: str
    """Observed subject, for the message that reports that it is off."""

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        """Start observing, and return functions that stop it, to be called from the last to the first.

        torch is imported; process groups may not exist yet.
        """


Site = dict[str, Any]
"""A line of the user's program, as arguments of `CodeLine`; empty if none is known."""

Fingerprint = dict[str, str]
"""Norms (``p``) and weighted sums (``w``) of parameters, and norms of gradients (``g``), as `Fingerprinter` packs
them."""


class SiteNote(TypedDict):
    """A note on a line of the user's program; by itself of kind ``data_parallel``: `nn.DataParallel` trains here."""

    site: Site


class WrappingNote(SiteNote):
    """DDP is about to wrap a model."""

    group: str
    """The process group's name, equal on all ranks; see `describe_group`."""
    at: int
    """Number of collectives that the group has started."""
    parameters: list[list[Any]]
    """Name, shape, dtype and requires_grad of parameters and buffers; the first 1024."""
    num_parameters: int


class ModelNote(SiteNote):
    """DDP has wrapped a model (``ddp``), or a wrapped model's weights were changed (``load``)."""

    group: str
    ordinal: str
    """The model's number in its group, equal on all ranks."""


class DdpNote(ModelNote):
    """The trainable parameters of a model that DDP has wrapped."""

    names: list[list[Any]]
    """Name, shape and dtype of each, in order."""
    find_unused: bool
    static: bool


class LoadNote(ModelNote):
    """A model was changed after DDP wrapped it, by `load_state_dict` or `apply`."""

    by: Literal["load_state_dict", "apply"]


class UnusedNote(ModelNote):
    """Parameters that the first backwards of a model with `find_unused_parameters` did not use."""

    num_backwards: int
    num_bytes: int
    names: list[str]


class SyncedNote(SiteNote):
    """The first steps of a model accumulated gradients, and each backward was reduced."""

    least: int
    most: int
    """Least and most backwards per step."""
    num_bytes: int
    """Size of the gradients."""


class ParametersNote(SiteNote):
    """DDP failed because of parameters: frozen after wrapping (``frozen``), or without gradients (``left_out``)."""

    names: list[str]
    num: int


class ParameterSetNote(SiteNote):
    """Parameters of one optimizer that belong to one DDP model, or to none. Written again if they change."""

    parameter_set: int
    """Number of the set on this rank; later notes refer to it."""
    key: list[Any]
    """Equal on all ranks: kind (``ddp`` or ``free``), group, model, and count of sets with the same key."""
    names: list[str]
    late: list[int]
    """Indices of parameters that were added, or became trainable, after DDP wrapped the model."""
    moved: list[str]
    """Parameters whose device or dtype has changed since then."""
    sizes: list[int]
    """Numbers of elements; only without a DDP model."""
    called: list[str]
    """Names that the program uses; only without a DDP model."""
    largest: int
    made: Site
    """Line that wrapped the DDP model."""
    dropped: Site
    """Line that wrapped a model with these parameters, if its wrapper has been freed."""


class OrdinaryStepNote(TypedDict):
    """An optimizer step; the only fields of most steps, see `JournalWriter.write_step`."""

    parameter_set: int
    step: int
    """Number of the step, equal on all ranks."""
    seq: int
    """Number of collectives that the group had started; -1 if unknown."""
    events: str
    """Forwards and backwards since the previous step; see `BackwardTracker`."""


class StepNote(OrdinaryStepNote, total=False):
    """An optimizer step that was checked, or whose gradients were not reduced."""

    fingerprint: Fingerprint
    is_copying: bool
    """True if the fingerprint follows, in a `FingerprintNote`."""
    rates: list[float]
    """Learning rates."""
    why_local: str
    """Why the last backward was not reduced."""
    local_site: Site
    """The line that caused it."""
    site: Site
    in_vain: Site
    """Line of a backward in `no_sync` that was reduced."""
    why_silent: str
    """Why gradients may differ between ranks."""


class FingerprintNote(TypedDict):
    """The fingerprint of an earlier step, copied from a device."""

    parameter_set: int
    step: int
    fingerprint: Fingerprint


class LastStepNote(FingerprintNote):
    """A sample of the parameters before the newest step, which may be the last one."""

    seq: int
    places: list[int]
    """Indices of the parameters in the sample."""


class ReductionOrderNote(SiteNote):
    """The order in which the program all-reduced gradients before a step."""

    key: list[Any]
    """Equal on all ranks: generation of the default group, group, and count of these notes."""
    names: list[str]
    order: list[str]
    """Name of the parameter for each all_reduce; empty for other tensors."""
    sums: str
    """Weighted sums of the parameters `names`."""
    line: Site
    """Line of the first all_reduce."""


class DevicesNote(SiteNote):
    """An operation failed because its tensors were on several devices."""

    by_device: dict[str, list[str]]
    message: str


class SaveNote(SiteNote):
    """A file was written with torch.save or safetensors."""

    path: str
    host: str
    start_ns: int
    end_ns: int


class CollectiveNote(SiteNote):
    """A collective called by the program; by itself of kind ``not_member``: this rank is not in its group."""

    op: str


class NotAwaitedNote(CollectiveNote):
    """The result of an asynchronous collective was used without waiting for it."""

    numel: int
    how: Literal["changed", "stepped with"]


class OnGraphNote(CollectiveNote):
    """A tensor with a graph was reduced."""

    case: Literal["sum", "backward"]
    """``backward``: backward was called on it afterwards; ``sum``: it holds the graphs of several losses."""
    losses: int
    numel: int


class DdpModelNote(SiteNote):
    """DDP has wrapped the `model`-th model of this process."""

    model: int
    ranks: list[int] | None
    """Ranks of its group; None for all ranks."""
    device: str
    host: str
    uuid: str
    """The accelerator's; empty on a CPU."""
    num_devices: int
    """Accelerators that the rank can see."""


PassKey = TypedDict("PassKey", {"loader": int, "pass": int})
"""Loader and number of a pass over it, equal on all ranks."""


class LoaderPassNote(PassKey):
    """A pass over a loader begins; None for what is not known."""

    length: int | None
    samples: int | None
    dataset: str
    size: int | None
    """Batch size."""
    workers: int
    sampler: dict[str, Any] | None
    """Kind and attributes; None for a stream."""
    part: int | None
    """Checksum of the indices of a subset."""
    share: list[int] | None
    """Sizes of the subset and of its dataset."""
    site: Site


class BatchNote(PassKey):
    """A loader returned a batch."""

    batch: int
    checksum: int | None
    rows: int | None


class NearEndNote(PassKey):
    """Two batches are left in a pass."""

    batch: int


class PassEndNote(PassKey):
    """A pass has ended."""

    batches: int
    samples: int
    evaluates: bool


class OrderNote(PassKey):
    """The first sample indices of a pass."""

    order: int
    """Checksum."""
    sorted: bool


class ShardNote(PassKey):
    """Samples read in a pass, by index and content."""

    pairs: list[tuple[int, int]]


class TrainsNote(PassKey):
    """A pass has begun to train a model."""

    model: int
    join: bool


class DrawsNote(PassKey):
    """Random numbers were drawn while a batch was fetched."""

    worker: int
    """-1 in the rank's own process."""
    fetch: int
    library: str
    before: int
    """Digest of the generator's state before."""
    site: Site


class CollectedNote(PassKey):
    """A number that the program reduced or gathered after an evaluation."""

    op: str
    reduce: str
    """Reduce-op; empty if the op has none."""
    averages: bool
    """True if the program takes the unweighted mean."""
    samples: int
    batches: int
    sizes: list[int]
    numel: int
    value: float | None
    site: Site


class ForwardNote(SiteNote):
    """The `forward`-th forward of a DDP model in training."""

    model: int
    forward: int


BatchKey = TypedDict("BatchKey", {"loader": int, "pass": int, "batch": int}, total=False)
"""The pass and batch that a forward trained with; empty if unknown."""


class InputNote(ForwardNote, BatchKey):
    """The input of a forward."""

    checksum: int
    rows: int | None
    elements: int


class RandomNote(ForwardNote):
    """States of a random generator around a forward."""

    library: str
    before: int
    after: int
    drawn: int
    """Numbers drawn for the batch before the forward, at least."""
    output: int | None
    """Checksum of the output."""


class NormsNote(SiteNote):
    """BatchNorm layers trained with few samples."""

    model: int
    layers: list[str]
    rows: list[int]


class NotFiniteNote(SiteNote, BatchKey):
    """A loss or gradient was not finite in a backward."""

    backward: int
    loss: str
    """The loss; empty if it was the gradient."""
    indices: Sequence[int]
    """The first samples of the batch."""


class SpoiledNote(SiteNote):
    """An optimizer step has written non-finite values into parameters."""

    backward: int
    parameters: list[str]


class FaultNote(TypedDict):
    """A probe failed and is off."""

    probe: str
    text: str


NOTES: Mapping[str, type] = {
    "wrapping": WrappingNote,
    "ddp": DdpNote,
    "load": LoadNote,
    "unused": UnusedNote,
    "synced": SyncedNote,
    "frozen": ParametersNote,
    "left_out": ParametersNote,
    "data_parallel": SiteNote,
    "parameter_set": ParameterSetNote,
    "step": StepNote,
    "fingerprint": FingerprintNote,
    "last_step": LastStepNote,
    "reduction_order": ReductionOrderNote,
    "devices": DevicesNote,
    "save": SaveNote,
    "not_member": CollectiveNote,
    "not_awaited": NotAwaitedNote,
    "on_graph": OnGraphNote,
    "ddp_model": DdpModelNote,
    "loader_pass": LoaderPassNote,
    "batch": BatchNote,
    "near_end": NearEndNote,
    "pass_end": PassEndNote,
    "order": OrderNote,
    "shard": ShardNote,
    "trains": TrainsNote,
    "draws": DrawsNote,
    "collected": CollectedNote,
    "input": InputNote,
    "random": RandomNote,
    "norms": NormsNote,
    "not_finite": NotFiniteNote,
    "spoiled": SpoiledNote,
    "fault": FaultNote,
}
"""Fields of each kind of note."""


class Notes:
    """Writes what one probe of `rank` notes into `journal`. An error in a hook is reported once and disables it.

    `finder` finds the user's line, `report` prints a line.
    """

    def __init__(
        self,
        name: str,
        journal: JournalWriter,
        *,
        rank: int,
        finder: SiteFinder,
        report: Callable[[str], None],
    ) -> None:
        self.name = name
        self.rank = rank
        self.is_off = False
        self.write_step = journal.write_step
        """Add an entry for an ordinary step, far more frequent than other entries."""
        self._journal = journal
        self._finder = finder
        self._report = report

    def write(self, kind: str, note: Mapping[str, Any]) -> None:
        """Add a `note`, of the type that `NOTES` has for `kind`, to the journal."""
        self._journal.write(kind, note)

    def user_frame(self) -> FrameType | None:
        """Return the innermost frame of the user on the caller's stack, else a library's; None if there is neither."""
        return self._finder.walk(sys._getframe(1))[0]

    def user_call(self) -> tuple[FrameType | None, CodeType | None]:
        """Return `user_frame`, and the function that its line called."""
        return self._finder.walk(sys._getframe(1))[:2]

    def site(self, frame: FrameType | None = None, line: int | None = None) -> Site:
        """Return the user's line from `frame` (default: the caller's) outwards.

        `line`: a different line of the same file.
        """
        fact = describe_site(self._finder.walk(frame or sys._getframe(1)))
        if line is not None and frame is not None:
            fact |= {"line": line, "text": linecache.getline(frame.f_code.co_filename, line).strip()[:200]}
        return {key: fact[key] for key in ("file", "line", "function", "text") if key in fact}

    def safely(self, function: Hook) -> Hook:
        """Wrap `function` so that an error turns this probe off. Once it is off, the wrapper returns None."""

        from torch._C._dynamo.eval_frame import set_eval_frame as set_compiler

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.is_off:
                return None
            # Inside a compiled function, torch.compile would trace what is called from here.
            compiler = set_compiler(None)
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
                self.switch_off(error)
                return None
            finally:
                set_compiler(compiler)

        keep_dynamo_out(guarded)
        return guarded

    def switch_off(self, error: Exception) -> None:
        """Stop observing because of `error`, which is noted in the journal and reported in one line."""
        self.is_off = True
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError, ValueError):  # the journal is closed
            self.write("fault", FaultNote(probe=self.name, text=text[:500]))
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            self._report(f"guard no longer looks at {self.name}: {text}")

    def around(
        self,
        owner: Any,
        name: str,
        *,
        before: Hook | None = None,
        after: Hook | None = None,
        raised: Hook | None = None,
        aliases: Sequence[Any] = (),
    ) -> Callable[[], None]:
        """Wrap `owner.name` in hooks. Returns a function that removes them.

        `before(*args, **kwargs)` runs first. `after(ticket, returned, result, *args, **kwargs)` runs last: `ticket` is
        what `before` returned, `returned` is False if the call raised. With `raised` instead of `after`, the hook runs
        only if the call raised. `aliases`: other objects with the same function under this name, such as the module
        that a pickle of the function refers to.
        """
        present = getattr(owner, name)
        wrapping: FunctionWrapper | None = getattr(present, "_ddpilot_wrapping", None)
        if wrapping is None or wrapping.wrapper is not present or wrapping.owner is not owner:
            wrapping = FunctionWrapper(owner, name)
        return wrapping.add(Hooks(self, before, after, after or raised), aliases)
