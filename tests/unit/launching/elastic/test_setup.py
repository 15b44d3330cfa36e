# SPDX-License-Identifier: Apache-2.0
"""Rendezvous backends of torch's."""

from __future__ import annotations

import importlib.util

import pytest

from ddpilot.errors import RendezvousError
from ddpilot.launching.elastic.options import RunOptions
from ddpilot.launching.elastic.setup import _torch_rendezvous


@pytest.mark.skipif(importlib.util.find_spec("etcd") is not None, reason="python-etcd is installed")
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_torch_rendezvous_names_the_package_that_etcd_needs(backend: str) -> None:
    """In place of a traceback of torch's stub."""
    options = RunOptions(target="train.py", rdzv_backend=backend, rdzv_endpoint="localhost:1")
    with pytest.raises(RendezvousError, match=f"preparing the {backend} rendezvous.*`pip install python-etcd`"):
        _torch_rendezvous(options, "job", print)
