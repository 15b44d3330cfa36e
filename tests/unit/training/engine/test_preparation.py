# SPDX-License-Identifier: Apache-2.0
"""`compile=` of `Loop.prepare`: in place, refused for a compiled model, with errors that name the line."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpilot.errors import LoopError
from ddpilot.group.protocol import FakeGroup
from ddpilot.training.engine.preparation import CompiledCall
from ddpilot.training.loop import Loop
from ddpilot.training.models.sharding import ParameterSharding


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler sets this variable itself, and reuses code that it has compiled with other arguments."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()


class Breaks(nn.Module):
    """A model that the compiler cannot capture as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Breaks the graph."""
        torch._dynamo.graph_break()  # here
        result: torch.Tensor = self.layer(x)
        return result


def prepare(model: nn.Module, compile: Any) -> Any:  # noqa: A002
    """Return the model that a loop prepares."""
    return Loop(group=FakeGroup()).prepare(model, compile=compile)


def test_prepare_compiles_in_place_and_copies_are_not_compiled() -> None:
    """The names in the state_dict remain; a second call with the same arguments changes nothing."""
    model = nn.Linear(2, 1)
    assert prepare(model, {"backend": "eager"}) is model
    call = model._compiled_call_impl
    assert isinstance(call, CompiledCall)
    assert list(model.state_dict()) == ["weight", "bias"]
    assert copy.deepcopy(model)._compiled_call_impl is None
    prepare(model, {"backend": "eager"})
    assert model._compiled_call_impl is call
    prepare(model, False)
    assert model._compiled_call_impl is call
    x = torch.ones(3, 2)
    assert torch.equal(model(x), copy.deepcopy(model)(x))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("max-autotune", "`compile` is 'max-autotune'. Pass True"),
        ({"mod": "default"}, "`compile` with 'mod'. Did you mean `?mode"),
    ],
)
def test_prepare_refuses_arguments_that_compile_does_not_have(given: Any, error: str) -> None:
    """By name, with a similar one."""
    with pytest.raises(LoopError, match=error):
        prepare(nn.Linear(1, 1), given)


def test_prepare_refuses_buckets_that_the_compiler_refuses() -> None:
    """Below the size of the first one, an assertion of torch's compiler would fail in the first forward pass."""
    with pytest.raises(LoopError, match="`bucket_cap_mb=0.5` with `compile`"):
        Loop(group=FakeGroup()).prepare(nn.Linear(1, 1), compile=True, bucket_cap_mb=0.5)


def test_prepare_refuses_to_compile_a_compiled_model() -> None:
    """Whichever of the two ways has compiled it."""
    with pytest.raises(LoopError, match=r"the result of torch.compile\(model\): it is compiled already"):
        prepare(torch.compile(nn.Linear(1, 1), backend="eager"), True)  # type: ignore[arg-type]
    model = nn.Linear(1, 1)
    model.compile(backend="eager")
    with pytest.raises(LoopError, match=r"a Linear on which `compile\(\)` was called: it is compiled already"):
        prepare(model, True)


def test_a_graph_that_breaks_is_reported_with_its_line() -> None:
    """With `fullgraph`; without it the model runs."""
    model = prepare(Breaks(), {"backend": "eager", "fullgraph": True})
    with pytest.raises(LoopError, match=r"the graph breaks at .*test_preparation.py:\d+ .*graph_break\(\)") as caught:
        model(torch.ones(1, 2))
    assert "leave `fullgraph` out" in str(caught.value)
    torch.compiler.reset()
    assert prepare(Breaks(), {"backend": "eager"})(torch.ones(1, 2)).shape == (1, 1)


def test_a_backend_that_fails_is_reported() -> None:
    """With a backend that needs less."""

    def failing(graph: object, inputs: object) -> Any:
        raise FileNotFoundError("no C++ compiler")

    model = prepare(nn.Linear(2, 1), {"backend": failing})
    with pytest.raises(LoopError, match=r"its backend failed: .*no C\+\+ compiler.*'aot_eager'"):
        model(torch.ones(1, 2))


def test_errors_of_the_model_itself_are_raised_as_they_are() -> None:
    """They are not the compiler's."""
    model = prepare(nn.Linear(2, 1), {"backend": "eager"})
    model(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="F.linear"):
        model(torch.ones(1, 3))


def test_layers_of_one_class_and_many_sizes_are_all_compiled() -> None:
    """More of them than the compiler keeps for one code object; those of one size share what was compiled."""
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    sizes = [*range(2, 13), 12, 12]
    model = nn.Sequential(*(nn.Linear(num, then) for num, then in itertools.pairwise(sizes)))
    sharding = ParameterSharding(layers=nn.Linear)
    Loop(group=FakeGroup()).prepare(model, shard=sharding, compile={"backend": count})
    x = torch.ones(3, 2)
    assert torch.equal(model(x), copy.deepcopy(model)(x))
    assert len(graphs) == len(set(itertools.pairwise(sizes))) > torch._dynamo.config.recompile_limit
