# SPDX-License-Identifier: Apache-2.0
"""Which variables NCCL knows is read from its library."""

from __future__ import annotations

from pathlib import Path

from ddpilot.profiler.tuning.nccl import describe_unknown, read_names


def test_names_are_whole_strings_of_the_library(tmp_path: Path) -> None:
    """A name inside a message, or a part of a longer name, is none."""
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(
        b"\x7fELF\0NCCL_ALGO\0NCCL_IB_HCA\0NCCL_DEBUG set by environment\0could not read NCCL_TIMEOUT\0xNCCL_NET\0"
    )
    assert read_names(library) == {"NCCL_ALGO", "NCCL_IB_HCA"}


def test_variables_that_do_nothing_are_named() -> None:
    """Those that are set and not known, those that torch reads, and well-known ones."""
    environ = {"NCCL_TIMEOUT": "1800", "NCCL_ALGO": "Ring", "NCCL_BLOCKING_WAIT": "1", "PATH": ""}
    found = describe_unknown(frozenset({"NCCL_ALGO", "NCCL_BUFFSIZE"}), environ)
    assert found[0] == "NCCL_BLOCKING_WAIT is not read by NCCL; torch reads it as TORCH_NCCL_BLOCKING_WAIT"
    assert found[1] == "NCCL_TIMEOUT=1800 does nothing: the installed NCCL does not know the name"
    assert "NCCL_TIMEOUT" in found[2]
    assert "NCCL_BUFFER_SIZE" in found[2]
