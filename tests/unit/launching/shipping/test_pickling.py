# SPDX-License-Identifier: Apache-2.0
"""Parcels: what goes in comes out, by value or as the receiver's own."""

from __future__ import annotations

import functools
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ddpilot.errors import LaunchError
from ddpilot.launching.shipping import pickling
from ddpilot.launching.shipping.memory_file import map_private
from ddpilot.launching.shipping.pickling import RankResults, importable_from_main, open_parcel, pack_parcel


def there(value: Any) -> tuple[Any, list[Any], list[Any]]:
    """(`value` as a rank gets it, the parent's definitions, the rank's)."""
    fd, defined = pack_parcel("test", value)
    opened, definitions = open_parcel(map_private(fd))
    os.close(fd)
    return opened, defined, definitions


def back(value: Any, known_there: Sequence[Any], known_here: Sequence[Any]) -> Any:
    """`value` of a rank as the parent gets it."""
    fd, _ = pack_parcel("test", value, known_there)
    opened, _ = open_parcel(map_private(fd), known_here)
    os.close(fd)
    return opened


@pytest.fixture
def cell() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs source text as a cell does: in a fresh ``__main__``."""
    before, main = sys.modules["__main__"], types.ModuleType("__main__")
    sys.modules["__main__"] = main

    def run(source: str) -> dict[str, Any]:
        exec(source, main.__dict__)
        return main.__dict__

    yield run
    sys.modules["__main__"] = before


@pytest.fixture
def rank_main(monkeypatch: pytest.MonkeyPatch) -> Callable[[], types.ModuleType]:
    """Turns this process's ``__main__`` into the empty one of a rank."""

    def become() -> types.ModuleType:
        main = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)
        return main

    return become


@pytest.mark.parametrize(
    "value",
    [None, 1, "ä", b"bytes", [1, (2, {3})], {"a": [1.5]}, lambda: 4],
    ids=lambda value: "a lambda" if callable(value) else repr(value),  # the same in each process that runs tests
)
def test_open_parcel_gives_back_what_was_packed(value: Any) -> None:
    """Plain values are equal, a lambda computes the same."""
    opened, _, _ = there(value)
    if callable(value):
        opened, value = opened(), value()
    assert opened == value


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_pack_parcel_keeps_tensors(dtype: torch.dtype) -> None:
    """Values, dtype, shape and strides survive."""
    tensor = torch.arange(12).to(dtype).reshape(3, 4).t()
    opened, _, _ = there(tensor)
    assert (opened.dtype, opened.shape, opened.stride()) == (dtype, tensor.shape, tensor.stride())
    assert torch.equal(opened, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.int16),
        torch.tensor(5),
        torch.eye(3).to_sparse(),
        torch.empty(2, 2, device="meta"),
    ],
    ids=["empty", "empty_3d", "scalar", "sparse_coo", "meta"],
)
def test_pack_parcel_keeps_unusual_tensors(tensor: torch.Tensor) -> None:
    """Empty, sparse and meta tensors arrive as what they were."""
    opened, _, _ = there(tensor)
    assert (opened.layout, opened.shape, opened.dtype, opened.device) == (
        tensor.layout,
        tensor.shape,
        tensor.dtype,
        tensor.device,
    )
    if tensor.device.type != "meta":
        assert torch.equal(opened.to_dense(), tensor.to_dense())


def test_pack_parcel_keeps_parameters_gradients_and_their_flags() -> None:
    """A Parameter stays one, with requires_grad and grad; a tensor with history arrives as a leaf's values."""
    layer = torch.nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    loss = layer(torch.ones(1, 2)).sum()
    loss.backward()
    (opened, loss_again), _, _ = there((layer, loss.detach()))
    assert isinstance(opened.weight, torch.nn.Parameter)
    assert (opened.weight.requires_grad, opened.bias.requires_grad) == (True, False)
    assert torch.equal(opened.weight, layer.weight)
    assert loss_again == loss


def test_pack_parcel_keeps_what_shares_memory_shared() -> None:
    """A tensor, its view and a tied weight still are one memory, apart from the sender's; the file holds it once."""
    base = torch.zeros(1000, dtype=torch.float64)
    fd, _ = pack_parcel("test", {"base": base, "view": base[10:20], "again": base})
    opened, _ = open_parcel(map_private(fd))
    size_bytes = os.fstat(fd).st_size
    os.close(fd)
    opened["view"].fill_(7)
    assert opened["base"][10] == opened["again"][19] == 7
    assert base.sum() == 0
    assert size_bytes < 2 * base.nbytes


def test_open_parcel_gives_every_reader_its_own_writable_arrays() -> None:
    """Two ranks that open one parcel write without seeing each other."""
    fd, _ = pack_parcel("test", (np.zeros(100), torch.zeros(100)))
    (first, first_tensor), _ = open_parcel(map_private(fd))
    (second, second_tensor), _ = open_parcel(map_private(fd))
    os.close(fd)
    first += 1
    first_tensor.add_(1)
    assert first.sum() == first_tensor.sum() == 100
    assert second.sum() == second_tensor.sum() == 0


def test_pack_parcel_takes_views_that_are_not_contiguous() -> None:
    """NumPy slices with steps and Fortran order arrive equal."""
    array = np.arange(24).reshape(4, 6)
    opened, _, _ = there([array[::2, ::3], np.asfortranarray(array), array[:, ::-1]])
    assert np.array_equal(opened[0], array[::2, ::3])
    assert np.array_equal(opened[1], array)
    assert np.array_equal(opened[2], array[:, ::-1])


def test_open_parcel_leaves_the_parent_s_globals_alone_when_a_function_comes_back(
    cell: Callable[[str], dict[str, Any]], rank_main: Callable[[], types.ModuleType]
) -> None:
    """A lambda made in the rank carries the rank's globals; the notebook's variable of that name keeps its value."""
    parent = cell("x = 1\ndef train():\n    global x\n    x = 2\n    return lambda: x\n")
    parent_main = sys.modules["__main__"]
    train, here, known = there(parent["train"])
    sys.modules["__main__"] = rank_main()
    fd, _ = pack_parcel("test", there(parent["train"])[0](), [])
    sys.modules["__main__"] = parent_main
    lambda_here, _ = open_parcel(map_private(fd), here)
    os.close(fd)
    assert lambda_here() == 2
    assert parent["x"] == 1
    assert train.__name__ == "train"
    assert known


def test_open_parcel_shares_main_s_globals_among_functions_in_a_rank(
    cell: Callable[[str], dict[str, Any]], rank_main: Callable[[], types.ModuleType]
) -> None:
    """Two functions of a notebook see one global of the rank, and it stands in the rank's ``__main__``."""
    parent = cell("count = 0\ndef bump():\n    global count\n    count += 1\ndef read():\n    return count\n")
    fd, _ = pack_parcel("test", (parent["bump"], parent["read"]))
    main = rank_main()
    (bump, read), _ = open_parcel(map_private(fd))
    os.close(fd)
    bump()
    assert read() == 1
    assert main.__dict__["count"] == 1
    assert parent["count"] == 0


def test_importable_from_main_takes_the_current_one_of_two_versions(cell: Callable[[str], dict[str, Any]]) -> None:
    """A cell that was run twice made two classes; both travel, and the newer one is bound in the rank."""
    old = cell("class Net:\n    version = 1\n")["Net"]
    new = cell("class Net:\n    version = 2\n")["Net"]
    for pair in ((old(), new()), (new(), old())):
        opened, _, definitions = there(pair)
        assert {type(net).version for net in opened} == {1, 2}
        assert importable_from_main(definitions)["Net"].version == 2


def test_importable_from_main_takes_top_level_names_of_main_alone(cell: Callable[[str], dict[str, Any]]) -> None:
    """Nested classes, lambdas' local names and functions of modules are not found in ``__main__`` by anyone."""

    def local() -> None: ...

    parent = cell("class Net:\n    class Inner: pass\ndef f(): pass\n")
    _, _, definitions = there((parent["Net"], parent["Net"].Inner, parent["f"], local))
    assert set(importable_from_main(definitions)) == {"Net", "f"}


def test_pack_parcel_keeps_the_file_of_code(cell: Callable[[str], dict[str, Any]]) -> None:
    """Of functions, methods and functions in functions: tracebacks and findings name the cell or script with it."""
    defined = cell(
        "exec(compile('def f():\\n  def g(): pass\\n  return g\\nclass C:\\n  def m(self): f', 'x.py', 'exec'))"
    )
    (function, cls), _, _ = there((defined["f"], defined["C"]))
    assert {code.co_filename for code in (function.__code__, function().__code__, cls.m.__code__)} == {"x.py"}


def test_pack_parcel_sends_module_definitions_by_reference() -> None:
    """What an importable module defines is imported by the rank, not copied."""
    opened, defined, _ = there((np.mean, torch.nn.Linear, pack_parcel))
    assert opened == (np.mean, torch.nn.Linear, pack_parcel)
    assert defined == []


def test_pack_parcel_sends_torch_s_operators_by_name() -> None:
    """`torch.ops` is not an ordinary module, and its attributes cannot be pickled."""
    sent = (torch.ops, torch.classes, torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor)
    opened, defined, _ = there(sent)
    assert all(here is known for here, known in zip(opened, sent, strict=True))
    assert defined == []


def test_pack_parcel_takes_functions_of_main_that_use_torch_s_operators(cell: Callable[[str], dict[str, Any]]) -> None:
    """cloudpickle pickles the submodules that a function mentions by name, such as `torch.ops`."""
    function = cell("import torch\ndef f(x): return torch.ops.aten.relu(x)\n")["f"]
    opened, _, _ = there(function)
    assert opened(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch says which of its norms are the old ones
@pytest.mark.parametrize(
    "norm",
    [
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        parametrizations.orthogonal,
        nn.utils.spectral_norm,
        nn.utils.weight_norm,
    ],
)
def test_parametrized_modules_travel(norm: Callable[[nn.Module], nn.Module]) -> None:
    """To a rank and back, also after a forward pass: the same weights by the same rule, trained as before."""
    first = nn.Linear(4, 4)
    module = nn.Sequential(norm(first), nn.Tanh())
    module.friend = first
    x = torch.ones(2, 4)
    module(x).sum().backward()
    opened, defined, known = there(module)
    returned = back(opened, known, defined)
    for one in (opened, returned):
        assert one.friend is one[0]
        assert type(one[0]) is not type(module[0]) or not hasattr(module[0], "parametrizations")
        assert dict(one.named_parameters()).keys() == dict(module.named_parameters()).keys()
        module.eval()
        one.eval()
        torch.testing.assert_close(one(x), module(x), rtol=0, atol=0)
        next(one.parameters()).data.add_(1.0)
        assert not torch.equal(one(x), module(x))
        module.train()


def test_an_optimizer_and_its_scheduler_travel_without_a_warning(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a rank and back: torch warns of a step that was forgotten, and of none that was made, before or there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch's optimizers would set it
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    opened, defined, known = there((optimizer, scheduler))
    forgotten, _, _ = there(scheduler)
    returned = back(opened, known, defined)
    optimizer.step()
    stepped, _, _ = there(scheduler)
    for one, its in (opened, returned):
        one.step()
        its.step()
        assert one.param_groups[0]["lr"] == pytest.approx(0.01)
    stepped.step()
    assert not recwarn.list
    forgotten.step()
    assert "before `optimizer.step()`" in str(recwarn.pop(UserWarning).message)


def test_a_parametrized_module_of_a_cell_travels(
    cell: Callable[[str], dict[str, Any]], rank_main: Callable[[], types.ModuleType]
) -> None:
    """Its class goes by value; a rule of the cell's too, and several for one weight."""
    names = cell(
        "import torch\n"
        "from torch.nn.utils import parametrize, parametrizations\n"
        "class Layer(torch.nn.Linear): pass\n"
        "class Twice(torch.nn.Module):\n"
        "    def forward(self, weight): return 2 * weight\n"
        "layer = parametrizations.weight_norm(Layer(2, 1))\n"
        "parametrize.register_parametrization(layer, 'weight', Twice())\n"
        "expected = layer.weight.detach()"
    )
    fd, _ = pack_parcel("test", names["layer"])
    rank_main()
    opened, _ = open_parcel(map_private(fd))
    os.close(fd)
    torch.testing.assert_close(opened.weight.detach(), names["expected"], rtol=0, atol=0)
    assert type(opened).__mro__[1].__name__ == "Layer"


def test_pack_parcel_takes_singledispatch_functions_of_main(cell: Callable[[str], dict[str, Any]]) -> None:
    """With what is registered, also after calls have filled the cache of weak references."""
    dispatch = cell(
        "import functools\n"
        "@functools.singledispatch\n"
        "def collate(x): return 'object'\n"
        "@collate.register\n"
        "def _(x: int): return 'number'\n"
        "collate(3)\n"
    )["collate"]
    arrived, *_ = there(dispatch)
    assert (arrived(3), arrived("3")) == ("number", "object")
    assert int in arrived.registry


class OddError(Exception):
    """Takes other arguments than those it hands on."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


def test_reduce_exception_rebuilds_without_init() -> None:
    """The class, the arguments that it handed on, and its attributes come back."""
    error = OddError("a", "b")
    assert pickling.is_plain_exception(error)
    build, arguments, state = pickling.reduce_exception(error)
    again = build(*arguments)
    vars(again).update(state)
    assert (type(again), again.args, again.second) == (OddError, ("a",), "b")


def test_is_plain_exception_leaves_classes_with_a_reduce_of_their_own_alone() -> None:
    """OSError and ImportError know themselves how they travel."""
    assert not pickling.is_plain_exception(OSError(2, "no"))
    assert not pickling.is_plain_exception("text")


def test_owning_module_is_that_of_the_globals_whatever_wraps_says() -> None:
    """A wrapper from a module is the module's; a function of `__main__`, or of a namespace of its own, is not."""
    wrapper = types.FunctionType(json.dumps.__code__, json.dumps.__globals__)
    wrapper.__module__ = "__main__"
    own: dict[str, object] = {"__name__": "json"}
    exec("def free(): pass", own)
    assert pickling.owning_module(own["free"]) is None
    assert pickling.owning_module(wrapper) == "json"


def test_reduce_cached_keeps_size_and_kind() -> None:
    """The receiver's cache is empty, of the same size."""
    cached = functools.lru_cache(maxsize=7, typed=True)(len)
    build, arguments = pickling.reduce_cached(cached)
    assert build(*arguments).cache_parameters() == {"maxsize": 7, "typed": True}


class _Broken:
    """Pickles, and raises where it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def results_of(*values: Any) -> RankResults:
    """Results as the launcher makes them, with every descriptor closed afterwards."""
    parcels = [pack_parcel("test", value, [])[0] for value in values]
    try:
        return RankResults([map_private(fd) for fd in parcels], [])
    finally:
        for fd in parcels:
            os.close(fd)


def test_rank_results_is_a_sequence_by_rank() -> None:
    """Index, negative index, slice, length, iteration, membership and text are a list's."""
    results = results_of("a", "b", "c")
    assert (results[0], results[-1], results[1:], len(results)) == ("a", "c", ["b", "c"], 3)
    assert list(results) == ["a", "b", "c"]
    assert "b" in results
    assert repr(results) == "RankResults(['a', 'b', 'c'])"
    with pytest.raises(IndexError):
        results[3]


def test_rank_results_gives_the_same_object_each_time() -> None:
    """A value is unpickled once, so that changes of it stay."""
    results = results_of({"a": 1})
    results[0]["a"] = 2
    assert results[0] == {"a": 2}


def test_rank_results_holds_no_descriptor_even_before_it_is_read() -> None:
    """A notebook may keep the unread results of hundreds of launches."""
    before = sorted(os.listdir("/proc/self/fd"))
    results = results_of(*range(20))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert list(results) == list(range(20))


def test_rank_results_names_the_rank_whose_value_cannot_be_read() -> None:
    """The others can still be read, and the original exception is chained."""
    results = results_of(1, _Broken())
    assert results[0] == 1
    with pytest.raises(LaunchError, match="reading what rank 1 returned: ValueError: invalid literal") as caught:
        results[1]
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.rank == 1
