# SPDX-License-Identifier: Apache-2.0
"""`ddpilot explain`: by code, by name, by message, and the list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpilot.cli.explain_command import _SUBJECTS, explain, find_fitting
from ddpilot.errors import DdpilotError
from ddpilot.findings.catalog import all_entries, find_entry

UNUSED = "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. It"


@pytest.mark.parametrize("words", ["DDP308", "308", "unused-parameters", UNUSED])
def test_explain_prints_the_page(words: str) -> None:
    """Code, number, name and message lead to the same page."""
    assert explain(words).startswith("# DDP308 unused-parameters: ")


MESSAGES = {
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:": "DDP701",
    "Signal 9 (SIGKILL) received by PID 4711": "DDP702",
    "exitcode  : -9 (pid: 4711)": "DDP702",
    "RuntimeError: CUDA error: out of memory": "DDP703",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB": "DDP703",
    "ncclUnhandledCudaError: Call to CUDA function failed.": "DDP704",
    "unhandled system error, NCCL version 2.27.5": "DDP704",
    "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:2251": "DDP704",
    "Timed out initializing process group in store based barrier on rank: 0": "DDP105",
    "BrokenPipeError: [Errno 32] Broken pipe": "DDP706",
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError": "DDP104",
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels": "DDP218",
    "RuntimeError: CUDA error: device-side assert triggered": "DDP705",
}
"""What torch, NCCL and torchrun print when a job of several GPUs ends."""

PASTED = {
    "RuntimeError: CUDA error: invalid device ordinal": "DDP122",
    "AssertionError: Invalid device id": "DDP122",
    "[rank1]: RuntimeError: No backend type associated with device type cpu": "DDP123",
    "RuntimeError: Tensors must be CUDA and dense": "DDP123",
    "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!": "DDP124",
    "RuntimeError: Distributed package doesn't have NCCL built in": "DDP124",
    "RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors)": "DDP329",
    "OSError: [Errno 24] Too many open files": "DDP801",
    "RuntimeError: received 0 items of ancdata": "DDP801",
    "RuntimeError: Your training graph has changed in this iteration, e.g., one parameter is unused in first": "DDP339",
    "RuntimeError: Modules with uninitialized parameters can't be used with `DistributedDataParallel`.": "DDP340",
    "UserWarning: Grad strides do not match bucket view strides. This may indicate grad was not created": "DDP341",
    "agent/server/api.py:719] Received Signals.SIGHUP death signal, shutting down workers": "DDP708",
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 1": "DDP708",
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15": "DDP701",
    "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 1": "DDP701",
    "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGSEGV": "DDP707",
    "torch.distributed.elastic.rendezvous.api.RendezvousClosedError": "DDP701",
    "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError": "DDP105",
    "ValueError: The hostname of the rendezvous endpoint ':29500' must be a dot-separated list of labels": "DDP104",
    "retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: "
    "Socket Timeout": "DDP215",
    "retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: "
    "Connection reset by peer": "DDP209",
    "RuntimeError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/rank_1": "DDP215",
    "(maybe TCPStore server has shut down too early), with error: failed to recv, got 0 bytes": "DDP209",
    "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring": "DDP218",
    "RuntimeError: NCCL communicator was aborted on rank 1.": "DDP218",
    "RuntimeError: Application timeout caused pair closure": "DDP218",
    "NCCL WARN Bootstrap : no socket interface found": "DDP107",
    "gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth0": "DDP106",
    "RuntimeError: Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1.": "DDP609",
    "module must have its parameters and buffers on device cuda:0 (device_ids[0]) but found one of them": "DDP330",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "DDP703",
    "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable": "DDP803",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "DDP802",
    "train.py: error: unrecognized arguments: --local_rank=0": "DDP121",
    "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 64])": "DDP501",
    "RuntimeError: DataLoader worker (pid 12345) exited unexpectedly with exit code 1.": "DDP607",
    "RuntimeError: DataLoader timed out after 120 seconds": "DDP213",
    "slurmstepd: error: *** STEP 4711.0 ON node01 CANCELLED AT 2026-11-28T10:00:00 DUE TO TIME LIMIT ***": "DDP709",
    "AssertionError: daemonic processes are not allowed to have children": "DDP125",
    "RuntimeError: context has already been set": "DDP126",
    "OMP: Error #15: Initializing libiomp5.dylib, but found libomp.dylib already initialized.": "DDP127",
    "_pickle.UnpicklingError: pickle data was truncated": "DDP603",
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess.": "DDP114",
    "[Warning]: destroy_process_group() was not called before program exit.": "DDP605",
}
"""Lines of real logs, of which the last two end in the middle of a message; the site's search finds the same pages."""

PARTS = {
    "ChildFailedError": "DDP701",
    "Signal 9 (SIGKILL)": "DDP702",
    "exitcode: -9": "DDP702",
    "exitcode  : -11 (pid: 12)": "DDP707",
    "CUDA out of memory": "DDP703",
    "cuda out of memory": "DDP703",
    "out of memory": "DDP703",
    "ncclUnhandledCudaError": "DDP704",
    "unhandled system error": "DDP704",
    "DistBackendError": "DDP704",
    "store based barrier": "DDP105",
    "Broken pipe": "DDP706",
    "RendezvousConnectionError": "DDP104",
    "address already in use": "DDP103",
    "EADDRINUSE": "DDP103",
    "device-side assert": "DDP705",
    "Some NCCL operations have failed or timed out": "DDP218",
    "SIGTERM": "DDP701",
    "SIGKILL": "DDP702",
    "sigsegv": "DDP707",
    "SIGABRT": "DDP707",
    "SIGBUS": "DDP707",
}
"""A part of a message: the whole name, within a word, or in a different case."""

QUERIES = {
    "hang": "DDP218",
    "My training hangs!": "DDP218",
    "deadlock": "DDP218",
    "hangs at loss.backward": "DDP218",
    "hangs at the end of an epoch": "DDP218",
    "stuck at init_process_group": "DDP105",
    "NCCL watchdog timeout": "DDP218",
    "loss is NaN": "DDP409",
    "only one GPU used": "DDP118",
    "hangs when rank 0 validates or saves a checkpoint": "DDP211",
    "the validation only runs on rank 0 and then it hangs": "DDP211",
    "GPUs idle": "DDP118",
    "slower than one GPU": "DDP721",
    "DataLoader is slow": "DDP721",
    "accuracy differs from one GPU": "DDP401",
    "killed -9": "DDP702",
    "port in use": "DDP103",
    "oom": "DDP703",
    "gradient accumulation": "DDP505",
    "resume from a checkpoint": "DDP602",
    "Jupyter": "DDP112",
    "Slurm": "DDP102",
    "Slurm time limit reached": "DDP709",
    "batch norm": "DDP408",
    "segfault": "DDP707",
}
"""Plain words, as somebody searches with them, and the page that fits best."""


@pytest.mark.parametrize(("message", "code"), [*MESSAGES.items(), *PASTED.items(), *PARTS.items()])
def test_explain_knows_the_usual_messages(message: str, code: str) -> None:
    """A whole message or a part of one leads to its page."""
    assert explain(message).startswith(f"# {code} ")


@pytest.mark.parametrize(("words", "first"), QUERIES.items())
def test_explain_lists_the_pages_that_fit_plain_words(words: str, first: str) -> None:
    """The likeliest first, a line each, and how to go on."""
    listed = explain(words)
    assert listed.splitlines()[2].startswith(f"{first}  ")
    assert f"`ddpilot explain {first}` prints one" in listed


def test_plain_words_have_pages_and_a_long_text_is_a_message() -> None:
    """Every subject names pages that exist; words within a long text are no question."""
    for _, pattern, numbers in _SUBJECTS:
        re.compile(pattern)
        assert all(find_entry(f"DDP{number}") for number in numbers)
    assert find_fitting("it was stuck " * 9) == ()


def test_explain_lists_every_page_without_words() -> None:
    """One line for each, then where to look by symptom."""
    lines = explain("").splitlines()
    assert lines.index("") == len(all_entries())
    assert "docs/faq.md has a command for each symptom" in lines[-1]


def test_explain_refuses_a_message_that_no_page_knows() -> None:
    """It quotes the message, shortened."""
    with pytest.raises(DdpilotError, match="no page matches 'xyz xyz xyz .*\\.\\.\\.'"):
        explain("xyz " * 200)


def test_explain_of_a_file_says_how_to_read_it(tmp_path: Path) -> None:
    """Its name is no message."""
    log = tmp_path / "log of the job.txt"
    log.write_text("Watchdog caught collective operation timeout")
    with pytest.raises(DdpilotError, match=re.escape(f"`ddpilot explain - < '{log}'`")):
        explain(str(log))


def test_explain_shows_code_and_the_command_that_names_rank_and_line() -> None:
    """Indented and without colors, unless they are asked for."""
    page = explain("DDP220")
    assert "\n    import torch\n" in page
    assert "\n    $ DDPILOT_WATCH=1 torchrun --nproc-per-node 2 train.py\n" in page
    assert "\n    $ ddpilot lint train.py\n" in page
    assert "\x1b" not in page
    assert "\x1b[1;31m## Wrong\x1b[0m" in explain("DDP220", color=True)
    assert "\x1b" in explain(UNUSED, color=True)


@pytest.mark.parametrize(
    "message", [UNUSED, "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"]
)
def test_explain_of_a_message_ends_with_what_to_run_next(message: str) -> None:
    """The message alone has no rank and no line; a code comes from a report, which has both."""
    commands = (
        "\n    DDPILOT_WATCH=1 torchrun --nproc-per-node 2 train.py\n    ddpilot run --nproc-per-node 2 train.py\n"
    )
    page = explain(message)
    assert page.endswith(commands)
    assert not explain(page.split()[1]).endswith(commands)  # by its code
    assert not explain("Cannot re-initialize CUDA in forked subprocess.").endswith(
        commands
    )  # before any rank is watched


def test_explain_of_a_log_with_two_messages_names_both_pages() -> None:
    """Before the first page, and after it, where the reader of a long page is."""
    text = explain(f"[rank1]: RuntimeError: {UNUSED}\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried")
    assert text.startswith("The text fits 2 pages: DDP308, DDP703. This is the first.\n\n# DDP308 ")
    assert "\nThe text also fits:\n\nDDP703  device-out-of-memory  CUDA out of memory" in text
    assert "\n`ddpilot explain DDP703` prints the next page.\n" in text
    assert not explain(UNUSED).startswith("The text fits")


def test_page_of_a_watchdog_timeout_names_the_other_causes_of_one() -> None:
    """Somebody with the message alone does not know which of them it was."""
    page = explain("Watchdog caught collective operation timeout")
    assert page.startswith("# DDP218 ")
    assert all(
        code in find_entry("DDP218").section("Other causes") for code in ("DDP201", "DDP207", "DDP209", "DDP220")
    )


def test_pages_of_messages_do_not_rely_on_a_finding() -> None:
    """A pasted message has none: the page says where it would be named."""
    assert [entry.code for entry in all_entries() if re.search(r"finding\s+(then )?names", entry.text)] == []


def test_explain_ends_with_the_address_of_the_page_if_the_project_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the page alone is printed."""
    assert "https://example.org" not in explain("DDP201")
    monkeypatch.setattr("ddpilot._project.PROJECT_URL", "https://example.org/ddpilot")
    assert explain("DDP201").endswith("\nhttps://example.org/ddpilot/blob/main/src/ddpilot/findings/pages/DDP201.md\n")
    assert "https://example.org/ddpilot/blob/main/docs/faq.md has a command" in explain("")
