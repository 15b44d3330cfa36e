# SPDX-License-Identifier: Apache-2.0
"""What guard reads from the emulated accelerator, and what it leaves alone while a graph is captured."""

from __future__ import annotations

import base64
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from ddpilot.guard.probes.parameters.fingerprint import Fingerprinter, LastWindows, PendingFingerprint
from ddpilot.record.accelerator import HostCopies


def _parameters(device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes, parameters = [(64, 64), (7,), (40, 33), (300,)], []
    for number, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.randn(shape, generator=generator).to(device))
        gradient = torch.randn(shape, generator=generator)
        if number == 0:
            gradient[20:50] = 0  # its middle
        parameter.grad = gradient.to(device)
        if number == 2:
            parameter = nn.Parameter(parameter.detach().t())  # neither contiguous, nor with a gradient
        parameters.append(parameter)
    return parameters


def _numbers(found: dict[str, str]) -> dict[str, Any]:
    return {key: np.frombuffer(base64.b64decode(text), np.float32) for key, text in found.items()}


def _wait(pending: PendingFingerprint) -> dict[str, str]:
    while not pending.has_arrived():
        pass
    return pending.fingerprint()


def compare() -> dict[str, Any]:
    """Whether fingerprints are those of the CPU, and how often the host waited for them."""
    copies = HostCopies()
    expected = _numbers(Fingerprinter(_parameters("cpu")).begin(copies).fingerprint())
    device: Any = torch.get_device_module("emu")
    fingerprinter = Fingerprinter(_parameters("emu"))
    torch.accelerator.synchronize()
    device.reset_host_syncs()
    firsts = [fingerprinter.begin(copies) for _ in range(2)]
    gradients = fingerprinter.begin(copies, only_gradients=True)
    found = [_numbers(_wait(each)) for each in (*firsts, fingerprinter.begin(copies))]
    found_gradients = _numbers(_wait(gradients))["g"]
    num_syncs = sum(device.host_syncs().values())
    with mock.patch("ddpilot.guard.probes.parameters.fingerprint.can_copy_from", return_value=False):
        waited = _numbers(fingerprinter.begin(copies).fingerprint())
    return {
        "begun": all(np.allclose(each[key], expected[key], rtol=1e-5) for each in found for key in "pwg"),
        "waited": all(np.allclose(waited[key], expected[key], rtol=1e-5) for key in "pwg"),
        "gradients": bool(np.allclose(found_gradients, expected["g"], rtol=1e-5)),
        "host_syncs": num_syncs,
    }


def last_windows() -> dict[str, Any]:
    """Whether the copy before the last step is that of the CPU, and how often the host waited to make it."""
    device: Any = torch.get_device_module("emu")
    found, num_syncs = [], 0
    for place in ("cpu", "emu"):
        windows = LastWindows.of([parameter for parameter in _parameters(place) if parameter.is_contiguous()])
        assert windows is not None
        device.reset_host_syncs()
        windows.copy()
        windows.copy()
        num_syncs += sum(device.host_syncs().values())
        taken = windows.taken()
        assert taken is not None
        fingerprinted = taken.fingerprint(until_s=float("inf"))
        assert fingerprinted is not None
        found.append(_numbers(fingerprinted))
    return {"alike": all(np.allclose(found[0][key], found[1][key]) for key in "pwg"), "host_syncs": num_syncs}


def while_capturing() -> dict[str, Any]:
    """What is begun, and what seems to have arrived, while this thread captures a graph."""
    copies, tensor = HostCopies(), torch.ones(3, device="emu")
    before = copies.begin(tensor)
    assert before is not None
    torch.accelerator.synchronize()
    has_arrived = before.has_arrived()
    with mock.patch("ddpilot.record.accelerator.is_capturing", return_value=True):
        begun = copies.begin(tensor)
        has_arrived_meanwhile = before.has_arrived()
    return {"before": has_arrived, "begun": begun, "meanwhile": has_arrived_meanwhile}


def memory_is_used_again() -> list[bool]:
    """Whether a copy of as much has the memory of one that was released, and others do not."""
    copies, tensor = HostCopies(), torch.ones(3, device="emu")
    first = copies.begin(tensor)
    second = copies.begin(tensor)
    assert first is not None
    assert second is not None
    torch.accelerator.synchronize()
    first.release()
    larger, again = copies.begin(torch.ones(4, device="emu")), copies.begin(tensor * 2)
    torch.accelerator.synchronize()
    assert again is not None
    return [second is first, larger is first, again is first, again.numbers.tolist() == [2.0] * 3]
