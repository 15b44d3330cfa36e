# SPDX-License-Identifier: Apache-2.0
"""`verify` with training libraries: right programs are equal, and a fault in each is named."""

from __future__ import annotations

import functools

import pytest

from ddpilot.diagnose.verify import target
from ddpilot.diagnose.verify.verify import verify
from ddpilot.repeated_runs import RepeatedLauncher
from tests.dist.diagnose import verify_libraries
from tests.preload import PRELOAD
from tests.soak import often

pytestmark = pytest.mark.timeout(240)
LIBRARIES = ("tests.notebook.shims.sitecustomize", "accelerate", "transformers.trainer")
"""Imported once for all ranks: Transformers takes each 2 s."""


@pytest.fixture(autouse=True)
def libraries_are_imported(shared_rank_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the rank server, but for Lightning."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # else that of scipy starts a thread, and ranks are not forked
    with_libraries = functools.partial(RepeatedLauncher, preload=(*PRELOAD, *LIBRARIES))
    monkeypatch.setattr(target, "RepeatedLauncher", with_libraries)


@often("with_transformers")
@pytest.mark.parametrize("name", ["with_lightning", "with_accelerate", "with_transformers"])
def test_right_program_of_a_library_is_equal(name: str) -> None:
    """The same samples, gradients and parameters, by name."""
    found = verify(getattr(verify_libraries, name), nproc_per_node=2, num_updates=3)
    assert found.is_equal, str(found)
    assert len(found.rows) == 3
    assert {row.num_samples[0] for row in found.rows} == {row.num_samples[1] for row in found.rows}


@often("batch_norm_in_accelerate-DDP408")
@pytest.mark.parametrize(
    ("name", "code"),
    [("scaled_in_lightning", "DDP823"), ("batch_norm_in_accelerate", "DDP408"), ("sums_in_transformers", "DDP823")],
)
def test_fault_in_a_program_of_a_library_is_named(name: str, code: str) -> None:
    """Parameters have their names in the module."""
    found = verify(getattr(verify_libraries, name), nproc_per_node=2, num_updates=3)
    assert found.verdict == "different", str(found)
    assert found.findings[0].code == code, str(found)
    if code == "DDP823":
        assert "net.0.weight" in found.render(verbose=True)
