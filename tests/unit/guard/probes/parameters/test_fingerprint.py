# SPDX-License-Identifier: Apache-2.0
"""Fingerprints differ for different tensors, and taking them changes nothing."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddpilot.guard.probes.parameters.fingerprint import LAST_WINDOW, WINDOW, Fingerprinter, LastWindows, is_plain
from ddpilot.guard.rules.parameters.fingerprint_comparison import compare
from ddpilot.record.accelerator import HostCopies


def take(*tensors: Tensor, gradients: tuple[Tensor | None, ...] = ()) -> dict[str, str]:
    """The fingerprint of new parameters with these values."""
    parameters = [nn.Parameter(tensor.clone(memory_format=torch.preserve_format)) for tensor in tensors]
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = gradient
    return read(Fingerprinter(parameters))


def read(fingerprinter: Fingerprinter) -> dict[str, str]:
    """What it takes on the CPU, at once."""
    pending = fingerprinter.begin(HostCopies())
    assert pending.has_arrived()
    return pending.fingerprint()


def unpack(text: str) -> array[float]:
    """The numbers of one kind."""
    return array("f", base64.b64decode(text))


def differ(first: dict[str, str], second: dict[str, str]) -> tuple[bool, bool]:
    """Whether gradients, and parameters, of two ranks differ."""
    names = {0: ["a", "b"], 1: ["a", "b"]}
    difference = compare(names, {0: first, 1: second})
    return bool(difference.gradients), bool(difference.parameters)


@pytest.fixture
def tensors() -> list[Tensor]:
    """A matrix larger than the window, and a vector that is not."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(64, 64, generator=generator), torch.randn(7, generator=generator)]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "other signs": lambda tensor: -tensor,
    "one value": lambda tensor: tensor + torch.eye(64) * (torch.arange(64) == 40) * 0.5,
    "another orthogonal matrix": lambda tensor: torch.linalg.qr(tensor.T).Q,
    "other rows": lambda tensor: tensor.flip(0),
    "a little larger": lambda tensor: tensor * 1.0001,
    "a NaN": lambda tensor: torch.where(torch.eye(64) > 0, torch.nan, tensor),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprints_differ_where_parameters_do(tensors: list[Tensor], change: str) -> None:
    """Also if the norm is the same."""
    base = torch.linalg.qr(tensors[0]).Q if "orthogonal" in change else tensors[0]
    assert differ(take(base, tensors[1]), take(CHANGES[change](base), tensors[1])) == (False, True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_fingerprints_of_the_same_values_are_the_same(tensors: list[Tensor], dtype: torch.dtype) -> None:
    """In every precision, with any gradient, and when taken again after the parameter has moved in memory."""
    values = [tensor.to(dtype) for tensor in tensors]
    gradients = (values[0] * 300, None)
    first, second = take(*values, gradients=gradients), take(*values, gradients=gradients)
    assert first == second
    parameters = [nn.Parameter(torch.zeros_like(value)) for value in values]
    fingerprinter = Fingerprinter(parameters)
    read(fingerprinter)
    for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
        parameter.data = value.clone()
        parameter.grad = gradient
    assert read(fingerprinter) == first


def test_fingerprints_see_gradients(tensors: list[Tensor]) -> None:
    """One that is missing, one that differs, and one that differs only where most of it is 0."""
    first = take(*tensors, gradients=(tensors[0], None))
    assert differ(first, take(*tensors, gradients=(tensors[0], tensors[1]))) == (True, False)
    assert differ(first, take(*tensors, gradients=(tensors[0] * 2, None))) == (True, False)
    rows, others = torch.zeros(2, 64, 64).unbind()
    rows[0], others[1] = 1.0, 2.0
    assert differ(take(*tensors, gradients=(rows,)), take(*tensors, gradients=(others,))) == (True, False)


def test_fingerprints_do_not_depend_on_the_layout(tensors: list[Tensor]) -> None:
    """A non-contiguous parameter is compared with a contiguous one, and read each time."""
    image = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(1))
    assert image.numel() > WINDOW
    spread = nn.Parameter(image.to(memory_format=torch.channels_last, copy=True))
    fingerprinter = Fingerprinter([spread, tensors[1]])
    assert differ(take(image, tensors[1]), read(fingerprinter)) == (False, False)
    with torch.no_grad():
        spread.neg_()
    assert differ(take(image, tensors[1]), read(fingerprinter)) == (False, True)
    assert differ(take(-image, tensors[1]), read(fingerprinter)) == (False, False)


def test_fingerprints_leave_numbers_and_random_state_alone(tensors: list[Tensor]) -> None:
    """Neither values, nor versions that autograd looks at, nor the generator change."""
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = parameter.detach() * 2
    before = [(parameter.clone(), parameter._version, parameter.grad) for parameter in parameters]
    state = torch.get_rng_state()
    read(Fingerprinter(parameters))
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, (value, version, gradient) in zip(parameters, before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter._version == version
        assert parameter.grad is gradient
        assert gradient is not None
        assert torch.equal(gradient, value * 2)


def test_is_plain_leaves_out_what_would_need_a_collective_or_has_no_numbers() -> None:
    """Subclasses such as DTensor, sparse and meta tensors, integers, and empty ones."""

    class Sub(Tensor):
        pass

    assert is_plain(nn.Parameter(torch.ones(2)))
    wrong = [
        *(torch.ones(2).as_subclass(Sub), torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")),
        *(torch.ones(2, dtype=torch.long), torch.ones(0), None),
    ]
    assert not any(map(is_plain, wrong))


@pytest.mark.parametrize(
    "shapes", [[(64, 64)] * 3, [(64, 64), (7,), (3, 300)]], ids=["windows alike", "windows unlike"]
)
def test_a_tensors_numbers_do_not_depend_on_what_it_is_taken_with(shapes: list[tuple[int, ...]]) -> None:
    """All windows are summed in one call, also with different sizes."""
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(at)) for at, shape in enumerate(shapes)]
    together = take(*tensors, gradients=tuple(tensors))
    for at, tensor in enumerate(tensors):
        alone = take(tensor, gradients=(tensor,))
        for kind in "pwg":
            assert unpack(together[kind])[at] == pytest.approx(unpack(alone[kind])[0], rel=1e-6)


def test_last_windows_keep_what_parameters_were(tensors: list[Tensor]) -> None:
    """Whatever changes them afterwards, also through `.data`; parameters that move in memory are followed."""
    parameters = [nn.Parameter(tensor) for tensor in (torch.zeros(3), *tensors)]
    windows = LastWindows.of(parameters)
    assert windows is not None
    assert windows.places == [1, 2]
    assert windows.taken() is None
    windows.copy()
    before = windows.taken()
    assert before is not None
    expected = [tensors[0][32:34].norm().item(), tensors[1].norm().item()]
    assert before.sizes == [LAST_WINDOW, 7]
    for parameter in parameters[1:]:
        parameter.data.mul_(2)
    fingerprint = before.fingerprint(0.0)
    assert fingerprint is not None
    assert list(unpack(fingerprint["p"])) == pytest.approx(expected)
    parameters[1].data, parameters[2].data = -tensors[0], tensors[1].double()
    windows.copy()
    after = windows.taken()
    assert after is not None
    moved = after.fingerprint(0.0)
    assert moved is not None
    assert list(unpack(moved["p"])) == pytest.approx([2 * norm for norm in expected])
    assert unpack(moved["w"])[0] == pytest.approx(-2 * unpack(fingerprint["w"])[0])


def test_last_windows_are_of_parameters_that_can_be_read_in_part() -> None:
    """A matrix stored in columns is skipped; one that changes to that is no longer read."""
    rows, columns = (nn.Parameter(torch.rand(20, 20)) for _ in range(2))
    columns.data = columns.data.t()
    assert LastWindows.of([columns]) is None
    windows = LastWindows.of([rows, columns])
    assert windows is not None
    assert windows.places == [0]
    windows.copy()
    rows.data = torch.rand(20, 20).t()
    windows.copy()
    assert windows.taken() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fingerprints_are_the_same_whatever_the_default_dtype_is(tensors: list[Tensor], dtype: torch.dtype) -> None:
    """Numbers are joined in float32, those of parameters in other dtypes as well."""
    tensors = [tensors[0], tensors[1].double()]
    expected = take(*tensors, gradients=tuple(tensors))
    torch.set_default_dtype(dtype)
    try:
        assert take(*tensors, gradients=tuple(tensors)) == expected
    finally:
        torch.set_default_dtype(torch.float32)
