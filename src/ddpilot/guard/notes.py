# SPDX-License-Identifier: Apache-2.0
"""The notes of probes: journal entries, whose fields the rules read. `NOTES` maps each kind to its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Site = dict[str, Any]
"""A line of the user's program, as arguments of `CodeLine`; empty if none is known."""

Fingerprint = dict[str, str]
"""Norms (``p``) and weighted sums (``w``) of parameters, and norms of gradients (``g``), as `Fingerprinter` packs
them."""


NOT_SEEN = -1.0
"""Norm of a gradient that does not exist or was not examined."""
MAX_GRADIENTS = 64
"""Up to this number of parameters, every gradient is examined."""
LOCAL_STEPS = 16
"""Steps without a reduction by DDP may be intended up to this one, which is always checked: local SGD skips some."""
NO_GROUP = "no group"
"""Start of the name of each generation in which a rank has no default process group; see `GroupGenerations`."""
MIN_NORM_SAMPLES = 16
"""Fewer samples per rank make statistics of BatchNorm noisy; from 32 on there is no effect. `Loop` uses the same limit
before an epoch (DDP501)."""


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


class LoadNote(ModelNote):
    """A model was changed after DDP wrapped it, by `load_state_dict` or `apply`."""

    by: Literal["load_state_dict", "apply"]


class UnusedNote(ModelNote):
    """Size of the parameters that the first backwards of a model with `find_unused_parameters` did not use."""

    num_backwards: int
    num_bytes: int


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
    is_seeded: bool
    """True if the program has seeded torch's random numbers."""
    settings: dict[str, str]
    """The class of the optimizer, as ``optimizer``, and its numeric settings except for learning rates."""


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
"""Loader and number of a pass over it, equal on all ranks; by itself of kind ``near_end``: two batches are left."""


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


class PassEndNote(PassKey):
    """A pass has ended."""

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


class BackwardNote(TypedDict):
    """A backward of this process, counted from a moment that all ranks share.

    Also: the losses and gradients of a device were checked up to this backward, or not all of those of this backward.
    """

    generation: str
    """The default process group; see `GroupGenerations`."""
    training: int
    """Number of DDP models of all ranks that this process had made in it before; 0 if none."""
    backward: int
    """Counts backwards from 1 since the last of them was made."""


class NotFiniteNote(SiteNote, BackwardNote, BatchKey):
    """A loss or gradient was not finite in a backward."""

    loss: str
    """The loss; empty if it was the gradient."""
    indices: Sequence[int]
    """The first samples of the batch."""


class SpoiledNote(SiteNote, BackwardNote):
    """An optimizer step has written non-finite values into parameters."""

    parameters: list[str]
    device: str
    """Type of the device of the first parameter that is not on the CPU; "cpu" if all are there."""
    group: str
    """Process group of the DDP model that owns one of them, see `describe_group`; empty if none does."""


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
    "near_end": PassKey,
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
    "checked": BackwardNote,
    "unchecked": BackwardNote,
    "fault": FaultNote,
}
"""Fields of each kind of note."""
