# SPDX-License-Identifier: Apache-2.0
"""Preparing a model where no group is needed, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddpilot import FakeGroup
from ddpilot.data.global_batches import Plan
from ddpilot.errors import LoopError, MismatchedCheckpointError
from ddpilot.training.checks.buffers import check_plan, find_batch_norms
from ddpilot.training.models.comm_hooks import check_compressible
from ddpilot.training.models.ddp import Choice, DDPOptions, find_unused, unwrap, wrap
from ddpilot.training.models.explain import MIN_UPDATES, Explained, Explanation, Seen, list_remedies, propose
from ddpilot.training.models.optimizers import full_state, load_full_state
from ddpilot.training.models.zero import shard_optimizer


def test_wrap_leaves_a_model_alone_when_there_is_one_rank() -> None:
    """No DDP, the same object."""
    model = nn.Linear(2, 2)
    assert wrap(model, FakeGroup()) == (model, ())
    assert unwrap(model) is model


def test_wrap_leaves_a_model_alone_when_it_trains_nothing() -> None:
    """DDP refuses a model without parameters to train: a frozen feature extractor is prepared like any other."""
    model = nn.Linear(2, 2).requires_grad_(False)
    assert wrap(model, FakeGroup(world_size=2)) == (model, ())


def test_wrap_refuses_synced_batch_norm_on_the_cpu() -> None:
    """torch's own error comes in the first forward; this one says what to use."""
    with pytest.raises(LoopError, match="runs only on GPUs, and this rank's device is the CPU. Use GroupNorm"):
        wrap(nn.BatchNorm1d(2), FakeGroup(), DDPOptions(sync_batch_norm=True))


def test_unwrap_keeps_an_averaged_model() -> None:
    """Its weights are the averages: only a DDP model inside is taken out."""
    averaged = AveragedModel(nn.Linear(2, 2))
    assert unwrap(averaged) is averaged


def test_batch_norms_are_found_unless_frozen() -> None:
    """In eval mode a layer takes no statistics."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[2].eval()
    assert find_batch_norms([model]) == ["0"]


@pytest.mark.parametrize(("size", "ranks"), [(64, ()), (48, (2,)), (24, (0, 1, 2))])
def test_check_batch_norms_names_the_ranks_with_few_samples(size: int, ranks: tuple[int, ...]) -> None:
    """Below 16 samples a rank; none at 16 and more."""
    plan = Plan(size * 3, size, world_size=3, batch_split=[2.0, 2.0, 1.5])
    found = check_plan([nn.BatchNorm1d(2)], plan)
    assert tuple(rank for finding in found for rank in finding.ranks) == ranks


@pytest.mark.parametrize("model", [nn.GroupNorm(1, 2), nn.BatchNorm1d(2).eval()])
def test_check_batch_norms_is_silent_about_others(model: nn.Module) -> None:
    """Models without it may have one sample on a rank."""
    assert check_plan([model], Plan(9, 8, world_size=4)) == ()
    assert check_plan([nn.BatchNorm1d(2)], object()) == ()


pytestmark = pytest.mark.usefixtures("compiler_is_loaded")

SEEN = Seen(num_updates=MIN_UPDATES, finds_unused=True, is_steady=True, left_out=())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"more": {"find_unused": True}}, "no option `find_unused`. Did you mean `find_unused_parameters`?"),
        ({"more": {"x": 1}}, "There are find_unused_parameters, static_graph, bucket_cap_mb,"),
        ({"more": {"broadcast_buffers": True}}, "`broadcast_buffers` is `forward_sync_buffers` here."),
        ({"more": {"process_group": None}}, "no option `process_group`"),
        ({"comm": "fp8"}, "`comm` is 'fp8'. Use 'bf16', 'fp16', 'powersgd'"),
        ({"shard": "model"}, "`shard` is 'model'. Use 'optimizer'"),
    ],
)
def test_options_refuse_what_ddp_does_not_have(options: dict[str, Any], said: str) -> None:
    """And say what there is."""
    with pytest.raises(LoopError) as caught:
        DDPOptions(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "said", "expected"),
    [(None, None, False), (None, "1", True), (None, "false", False), (False, "1", False), (True, "0", True)],
)
def test_find_unused_follows_the_variable_unless_asked(asked: bool | None, said: str | None, expected: bool) -> None:
    """Argument, then DDP_FIND_UNUSED_PARAMETERS, then False; the reason names the variable where it decided."""
    environ = {} if said is None else {"DDP_FIND_UNUSED_PARAMETERS": said}
    value, origin = find_unused(DDPOptions(find_unused_parameters=asked), environ)
    assert value is expected
    assert ("DDP_FIND_UNUSED_PARAMETERS=" in origin) == (asked is None and said is not None)


def test_find_unused_refuses_another_value_of_the_variable() -> None:
    """Rather than take "maybe" for one of both."""
    with pytest.raises(LoopError, match="DDP_FIND_UNUSED_PARAMETERS is 'maybe'. Set it to 1 or 0"):
        find_unused(DDPOptions(), {"DDP_FIND_UNUSED_PARAMETERS": "maybe"})


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(1, 1).double(), "parameter weight is torch.float64"),
        (nn.Linear(1, 1, dtype=torch.complex64), "parameter weight is torch.complex64"),
        (nn.Sequential(nn.Embedding(2, 1, sparse=True)), "layer 0 has sparse gradients"),
    ],
)
def test_comm_refuses_gradients_that_16_bits_cannot_stand_for(model: nn.Module, said: str) -> None:
    """By name, before anything is wrapped; frozen parameters have none."""
    with pytest.raises(LoopError, match=said):
        check_compressible(model, "bf16")
    check_compressible(nn.Linear(1, 1).double().requires_grad_(False), "bf16")


@pytest.mark.parametrize(
    ("seen", "codes"),
    [
        ([SEEN, SEEN], ["DDP502"]),
        ([SEEN, replace(SEEN, num_updates=MIN_UPDATES - 1)], []),
        ([SEEN, replace(SEEN, is_steady=False)], []),
        ([SEEN, replace(SEEN, left_out=("b",))], []),
        ([replace(SEEN, left_out=("b",))] * 2, ["DDP503"]),
        ([replace(SEEN, finds_unused=False)] * 2, []),
    ],
)
def test_propose_asks_every_rank(seen: list[Seen], codes: list[str]) -> None:
    """One rank that has seen too little, or something else, is enough to say nothing."""
    assert [finding.code for finding in propose(seen, "Net", ())] == codes


def test_propose_looks_at_the_rank_that_waits_least() -> None:
    """The others wait for it, and not for the exchange."""
    waiting = replace(
        SEEN,
        finds_unused=False,
        forward_ms=10,
        backward_ms=20,
        exchange_ms=60,
        overlap_ms=10,
        exchanged_bytes=10_000_000,
    )
    last = replace(waiting, exchange_ms=30, overlap_ms=10)
    (finding,) = propose([waiting, last], "Net", ["a different bucket_cap_mb"])
    assert finding.code == "DDP504"
    assert finding.ranks == (1,)
    assert finding.summary == "40 % of an update is spent waiting for gradients"
    assert finding.fix == "Larger batches; a different bucket_cap_mb."
    assert propose([waiting, replace(last, overlap_ms=25)], "Net", ()) == ()


def test_list_remedies_leaves_out_what_is_on_already_or_does_not_go() -> None:
    """Accumulation, 16 bits, a size of buckets; float64 cannot cross in 16 bits."""
    default, chosen = (Choice("comm", "None", ""), Choice("bucket_cap_mb", "25", "")), (Choice("comm", "bf16", ""),)
    assert [text[:11] for text in list_remedies(nn.Linear(1, 1), default, 1)] == [
        "accumulate=",
        'comm="bf16"',
        "a different",
    ]
    assert list_remedies(nn.Linear(1, 1), chosen, 4) == []
    assert list_remedies(nn.Linear(1, 1).double(), default, 4) == ["a different bucket_cap_mb"]


def test_propose_says_nothing_of_an_exchange_of_few_bytes() -> None:
    """Fewer of them would not shorten it."""
    waiting = replace(SEEN, finds_unused=False, forward_ms=1, backward_ms=1, exchange_ms=9, exchanged_bytes=356)
    assert propose([waiting, waiting], "Net", ['comm="bf16"']) == ()
    assert len(propose([replace(waiting, exchanged_bytes=2_000_000)] * 2, "Net", ())) == 1


def test_explanation_shows_text_as_text() -> None:
    """HTML in a name stays a name; nothing prepared is said, too."""
    assert "&lt;b&gt;" in Explanation((Explained("<b>"),))._repr_html_()
    assert str(Explanation(())) == "nothing has been prepared yet"


def test_full_state_of_a_plain_optimizer_is_its_state_dict() -> None:
    """It loads back, and an optimizer of other groups is refused before anything changes."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    state = full_state(optimizer)
    assert state == optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    load_full_state(optimizer, state)
    assert optimizer.param_groups[0]["lr"] == 0.5
    other = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=0.1)
    with pytest.raises(
        MismatchedCheckpointError, match="its groups have 1 parameters, the groups of this SGD have 1, 1"
    ):
        load_full_state(other, state)


def make_lbfgs() -> torch.optim.Optimizer:
    """An optimizer that looks at all parameters together."""
    return torch.optim.LBFGS([nn.Parameter(torch.ones(1))])


def make_mixed() -> torch.optim.Optimizer:
    """Parameters of two dtypes."""
    return torch.optim.SGD([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1).double())], lr=0.1)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (make_lbfgs, "LBFGS, which updates all parameters together"),
        (make_mixed, "parameters of torch.float32 and torch.float64"),
    ],
)
def test_shard_refuses_what_cannot_be_divided(make: Any, found: str) -> None:
    """On one rank too: a program is to be the same at any number of them."""
    with pytest.raises(LoopError, match=found):
        shard_optimizer(make(), FakeGroup())


def test_shard_leaves_an_optimizer_alone_when_there_is_one_rank() -> None:
    """The same object."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert shard_optimizer(optimizer, FakeGroup()) is optimizer
