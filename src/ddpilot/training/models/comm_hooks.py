# SPDX-License-Identifier: Apache-2.0
"""Communication hooks of DDP: gradients in 16 bits, PowerSGD with its error feedback, and hooks of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import LoopError

Hook = Callable[[Any, Any], Any]
"""A communication hook of DDP: `hook(state, bucket)` returns a future of the reduced gradients."""


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """How `Loop.prepare(model, optimizer, comm=PowerSGD(rank=4))` compresses gradients. LoopError if invalid.

    Each gradient of two or more dimensions is sent as two thin matrices. The error of this approximation is added to
    the gradient of the next update (error feedback). Each rank keeps its own error, also in checkpoints.
    """

    rank: int = 1
    """Number of columns of the matrices that are sent. More columns are closer to the gradient, and take more bytes."""
    start: int = 1_000
    """Number of updates with all-reduced gradients before compression, at least 2; torch suggests 10 % of all."""
    min_compression_rate: float = 2.0
    """Gradients that compression would not make this many times smaller are all-reduced unchanged."""
    error_feedback: bool = True
    """False: the error is dropped, which saves the memory of one set of gradients and costs accuracy."""
    epsilon: float = 1e-8
    """Added to the length of a column, so that gradients of zeros remain zeros; torch's own default is 0."""
    seed: int = 0
    """Seeds the first matrices, the same on all ranks."""

    def __post_init__(self) -> None:
        limits = {"rank": 1, "start": 2, "min_compression_rate": 0, "epsilon": 0}
        for name, least in limits.items():
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise _error("powersgd", f"`{name}` is {value!r}", f"Pass a number of {least} or more.")

    def make_state(self) -> Any:
        """Return torch's `PowerSGDState` of these options."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState  # used by few programs

        return PowerSGDState(
            None,  # the current default process group, also after that was rebuilt
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=self.start,
            min_compression_rate=self.min_compression_rate,
            use_error_feedback=self.error_feedback,
            orthogonalization_epsilon=self.epsilon,
            random_seed=self.seed,
        )


Comm = Literal["bf16", "fp16", "powersgd"] | PowerSGD | Hook | tuple[Any, Hook]
"""What `comm` of `Loop.prepare` accepts."""


def check_comm(comm: object) -> None:
    """Raise LoopError unless `comm` is a name, a `PowerSGD`, a hook, (state, hook) or None."""
    is_pair = isinstance(comm, tuple) and len(comm) == 2 and callable(comm[1])
    is_name = comm is None or (isinstance(comm, str) and comm in _WHY)
    is_hook = isinstance(comm, PowerSGD) or is_pair or (callable(comm) and not isinstance(comm, type))
    if not (is_name or is_hook):
        fix = "Use 'bf16', 'fp16', 'powersgd', PowerSGD(rank=..., start=...), a communication hook, (state, hook) "
        raise LoopError("preparing a model", found=f"`comm` is {comm!r}", fix=f"{fix}or None.")


def describe_comm(comm: Any) -> tuple[str, str]:
    """Return the value of `comm` as text, and the reason for it."""
    if comm is None or isinstance(comm, str):
        return str(comm), _WHY[comm]
    if isinstance(comm, PowerSGD):
        feedback = "what is lost is added to the next one" if comm.error_feedback else "what is lost is not kept"
        why = f"from update {comm.start} on, gradients are sent as matrices of rank {comm.rank}; {feedback}"
        return "powersgd", why
    hook = comm[1] if isinstance(comm, tuple) else comm
    return getattr(hook, "__name__", type(hook).__name__), "requested; gradients are what the hook returns"


def runs_alone(comm: Any) -> bool:
    """True if a hook also changes the gradients of a single rank, so that one rank runs in DDP as well."""
    return comm is not None and not _is_16_bit(comm)


def _is_16_bit(comm: object) -> bool:
    return isinstance(comm, str) and comm in ("bf16", "fp16")


def is_powersgd(comm: object) -> bool:
    """True if `comm` compresses gradients by PowerSGD with ddpilot's options."""
    return isinstance(comm, PowerSGD) or (isinstance(comm, str) and comm == "powersgd")


def check_compressible(model: nn.Module, comm: Any) -> None:
    """Raise LoopError if a parameter or a layer of `model` does not support `comm`."""
    is_low_rank = is_powersgd(comm)
    if not (_is_16_bit(comm) or is_low_rank):
        return
    name_of = "powersgd" if is_low_rank else str(comm)
    refused = [torch.complex64, torch.complex128, *[torch.float64] * (not is_low_rank)]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in refused:
            found = f"parameter {name} is {parameter.dtype}"
            raise _error(name_of, found, "Leave `comm` out, or make the model float32.")
        if is_low_rank and parameter.requires_grad and not parameter.ndim:
            raise _error(name_of, f"parameter {name} has no dimension", "Give it the shape (1,).")
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            found = f"layer {name or type(layer).__name__} has sparse gradients"
            raise _error(name_of, found, "Make it with sparse=False, or leave `comm` out.")


def register(model: DistributedDataParallel, comm: Comm) -> None:
    """Let `comm` reduce the gradients of `model`. Raises LoopError for a hook that DDP does not accept."""
    state: Any
    hook: Any
    if isinstance(comm, str) and comm != "powersgd":
        # With state None, the hook uses the current default process group, also after that was rebuilt.
        state, hook = None, _to_bf16 if comm == "bf16" else default_hooks.fp16_compress_hook
    elif isinstance(comm, str | PowerSGD):
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook as hook

        state = (comm if isinstance(comm, PowerSGD) else PowerSGD()).make_state()
    else:
        state, hook = comm if isinstance(comm, tuple) else (None, comm)
    if getattr(hook, "__name__", "") == "powerSGD_hook" and hasattr(state, "error_dict"):
        state, hook = CarriedErrors(state, hook, model), _run_carried
    try:
        model.register_comm_hook(state, hook)
    except (ValueError, TypeError, KeyError) as error:
        found = f"DDP does not accept the hook {getattr(hook, '__name__', hook)!r}: {error}"
        fix = "Write `def hook(state, bucket)`, without annotations, which returns a torch.futures.Future."
        raise LoopError("preparing a model", found=found, fix=fix) from error


def hook_state(model: DistributedDataParallel) -> Any:
    """Return what each rank keeps from one update to the next for the hook of `model`; None if nothing can be saved."""
    kept = (state for _, state in model._comm_hooks)
    return next((one for one in kept if all(hasattr(one, name) for name in ("state_dict", "load_state_dict"))), None)


def average_before_reading(model: DistributedDataParallel) -> None:
    """Average the weights of `model` if its ranks update them on their own (`sync_every`). Collective then."""
    for _, state in model._comm_hooks:
        if hasattr(state, "average_before_reading"):
            state.average_before_reading()


def carries_errors(models: Sequence[nn.Module]) -> bool:
    """True if a hook adds gradients of earlier updates, in whose unit those of the next one have to be."""
    return any(_carried_by(model) is not None for model in models)


def forget_errors(models: Sequence[nn.Module]) -> None:
    """Drop error feedback after gradients that were not finite, on all ranks alike."""
    for model in models:
        if (carried := _carried_by(model)) is not None:
            carried.forget()


def _carried_by(model: Any) -> CarriedErrors | None:
    hooks = getattr(getattr(model, "_orig_mod", model), "_comm_hooks", ())
    return next((state for _, state in hooks if isinstance(state, CarriedErrors)), None)


class CarriedErrors:
    """torch's state of PowerSGD, whose error feedback and matrices follow the parameters into other buckets.

    torch keeps them by the index of a bucket. A resumed run begins with buckets in the order of definition, which DDP
    rebuilds after the first update. A pair of tensors of a parameter: its error, and its matrix Q or None.
    """

    def __init__(self, state: Any, hook: Hook, model: DistributedDataParallel) -> None:
        self.state = state
        self.hook = hook
        self._names = {id(one): name for name, one in model.module.named_parameters()}
        self._buckets: dict[int, list[torch.Tensor]] = {}
        """The parameters of each bucket, in order, as of the last update."""
        self._loose: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        """What is kept of parameters whose bucket is not known yet, by name."""

    def fit(self, bucket: Any) -> None:
        """Arrange what is kept as `bucket` is, if its parameters have changed."""
        index, parameters = bucket.index(), bucket.parameters()
        now = list(map(id, parameters))
        known = self._buckets.get(index)
        if known is not None and list(map(id, known)) == now:
            return
        ids = set(now)
        for other in [at for at, held in self._buckets.items() if at == index or not ids.isdisjoint(map(id, held))]:
            self._loosen(other)
        self._buckets[index] = parameters
        own = [self._loose.pop(self._names[one], (None, None)) for one in now]
        errors = [error for error, _ in own]
        if all(error is not None for error in errors):
            like = bucket.buffer()
            self.state.error_dict[index] = torch.cat([one.to(like).reshape(-1) for one in errors])  # type: ignore[union-attr]
        order = self._compressed(parameters)
        matrices = [own[place][1] for place, _ in order]
        if matrices and all(one is not None for one in matrices):
            like = bucket.buffer()
            rows = sum(size.p for _, size in order)
            self.state.p_memory_dict[index] = like.new_empty(rows)
            self.state.q_memory_dict[index] = torch.cat([one.to(like).reshape(-1) for one in matrices])  # type: ignore[union-attr]

    def _loosen(self, index: int) -> None:
        parameters = self._buckets.pop(index)
        error = self.state.error_dict.pop(index, None)
        q_memory = self.state.q_memory_dict.pop(index, None)
        self.state.p_memory_dict.pop(index, None)
        errors = [None] * len(parameters) if error is None else error.split([one.numel() for one in parameters])
        matrices: dict[int, torch.Tensor] = {}
        if q_memory is not None:
            order = self._compressed(parameters)
            parts = q_memory.split([size.q for _, size in order])
            matrices = {place: part for (place, _), part in zip(order, parts, strict=True)}
        for place, parameter in enumerate(parameters):
            self._loose[self._names[id(parameter)]] = (errors[place], matrices.get(place))

    def _compressed(self, parameters: Sequence[torch.Tensor]) -> list[tuple[int, _Sizes]]:
        """Return index and sizes of the parameters that are compressed, in torch's order: by shape."""
        state = self.state
        by_shape: dict[tuple[int, int], list[tuple[int, _Sizes]]] = {}
        for place, one in enumerate(parameters):
            n, m = one.shape[0], one[:1].numel()
            rank = min(n, m, state.matrix_approximation_rank)
            if (n + m) * rank * state.min_compression_rate < n * m:
                by_shape.setdefault((n, m), []).append((place, _Sizes(n * rank, m * rank)))
        return [pair for pairs in by_shape.values() for pair in pairs]

    def forget(self) -> None:
        """Drop errors and matrices."""
        for kept in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict, self._loose):
            kept.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps, by the names of parameters."""
        buckets, loose = dict(self._buckets), dict(self._loose)
        kept = {name: getattr(self.state, name).copy() for name in _DICTS}
        for index in buckets:
            self._loosen(index)
        found, self._loose = self._loose, loose
        self._buckets = buckets
        for name, before in kept.items():
            getattr(self.state, name).update(before)
        kind, words, *rest = self.state.rng.get_state()
        return {
            "iter": self.state.iter,
            "rng": [kind, words.tolist(), *rest],
            "errors": {name: error for name, (error, _) in found.items() if error is not None},
            "matrices": {name: matrix for name, (_, matrix) in found.items() if matrix is not None},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, into buckets of any order."""
        self.forget()
        self._buckets.clear()
        self.state.iter = saved["iter"]
        self.state.rng.set_state(tuple(saved["rng"]))
        names = {*saved["errors"], *saved["matrices"]}
        self._loose = {name: (saved["errors"].get(name), saved["matrices"].get(name)) for name in names}


_DICTS = ("error_dict", "p_memory_dict", "q_memory_dict")


@dataclass(frozen=True)
class _Sizes:
    p: int
    q: int


def _run_carried(carried: CarriedErrors, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    carried.fit(bucket)
    future = carried.hook(carried.state, bucket)
    if bucket.buffer().device.type == "cpu":
        # torch's hook waits for collectives in gloo's own threads: two buckets at once would occupy all of them.
        future.wait()
    return future  # type: ignore[no-any-return]


def _to_bf16(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    # DDP rejects bf16_compress_hook itself without CUDA, although gloo can sum bfloat16: it tests the hook's name.
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


for _hook in (_run_carried, _to_bf16):
    # DDP compares the annotations of a hook with the classes themselves, and here annotations are strings.
    _hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]})

_WHY: dict[Any, str] = {
    None: "gradients are all-reduced in their own dtype, with the numbers of a single process",
    "bf16": "half of fp32's bytes, with its range and 8 bits of precision",
    "fp16": "half of fp32's bytes, with 11 bits of precision; above 65,504 on any rank a gradient becomes infinite",
    "powersgd": "from update 1,000 on, gradients are sent as matrices of rank 1; what is lost is added to the next one",
}


def _error(comm: str, found: str, fix: str) -> LoopError:
    return LoopError(f'preparing a model with `comm="{comm}"`', found=found, fix=fix)
