# SPDX-License-Identifier: Apache-2.0
"""Rendezvous backends of torch's."""

from __future__ import annotations

import importlib.util

import pytest

from ddpilot.errors import RendezvousError
from ddpilot.launching.elastic.options import RunOptions
from ddpilot.launching.elastic.setup import _torch_rendezvous, _wait


@pytest.mark.skipif(importlib.util.find_spec("etcd") is not None, reason="python-etcd is installed")
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_torch_rendezvous_names_the_package_that_etcd_needs(backend: str) -> None:
    """In place of a traceback of torch's stub."""
    options = RunOptions(target="train.py", rdzv_backend=backend, rdzv_endpoint="localhost:1")
    with pytest.raises(RendezvousError, match=f"preparing the {backend} rendezvous.*`pip install python-etcd`"):
        _torch_rendezvous(options, "job", print)


def test_wait_returns_and_raises_what_the_call_does() -> None:
    """Like a direct call, and without a notice for a short wait."""
    said: list[str] = []
    options = RunOptions(target="train.py", rdzv_backend="c10d")
    assert _wait(lambda: 7, options, said.append) == 7
    with pytest.raises(ValueError, match="bad"):
        _wait(lambda: int("bad"), options, said.append)
    assert said == []
