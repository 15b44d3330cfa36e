# SPDX-License-Identifier: Apache-2.0
"""Which updates are recorded, and what a trace says of the clock."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ddpilot.errors import LaunchError
from ddpilot.guard.hook import install
from ddpilot.profiler.rank.node_clocks import name_clock
from ddpilot.profiler.rank.tracing import NvtxProbe, TraceWindow
from ddpilot.profiler.spans_file import OPTIONS_VARIABLE, RankOptions
from ddpilot.profiler.traces import CLOCK_KEY, find_traces


def test_a_window_is_recorded_in_each_cycle(tmp_path: Path) -> None:
    """One update is left out, one warms up and two are kept; after a cycle one more update is slow."""
    window = TraceWindow(tmp_path, 0, RankOptions(wait=1, warm_up=1, active=2, repeat=2, memory=True))
    recorded = []
    for _ in range(11):
        recorded.append(window.is_recording)
        torch.ones(4).sum()
        window.end_update()
    window.stop()
    assert recorded == [False, True, True, True, True, True, True, True, True, False, False]
    paths = list(find_traces(tmp_path, 0))
    assert [path.name for path in paths] == ["trace_rank_0.json.gz", "trace_rank_0_2.json.gz"]
    with gzip.open(paths[0], "rt", encoding="utf-8") as file:
        trace = json.load(file)
    assert trace[CLOCK_KEY]["name"] == name_clock()
    assert "[memory]" in {event["name"] for event in trace["traceEvents"]}
    assert window.slow_down is not None


def test_rank_options_travel_in_the_environment() -> None:
    """Without the variable they are the defaults; a window without updates is refused."""
    options = RankOptions(wait=2, nvtx=True, measures_group=True)
    assert RankOptions.from_environ({OPTIONS_VARIABLE: options.to_json()}) == options
    assert RankOptions.from_environ({}) == RankOptions()
    with pytest.raises(LaunchError, match="reading --trace-window"):
        RankOptions(active=0)


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed environment variable, which torch's optimizers would set."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")


def run(folder: Path, probe: NvtxProbe) -> None:
    """One update, and an evaluation."""

    def make() -> NvtxProbe:
        return probe

    reported: list[str] = []
    make.name = probe.name  # type: ignore[attr-defined]
    stop = install(folder / "journal", rank=0, probes=(make,), report=reported.append)
    try:
        model: Any = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.ones(2, 3)), batch_size=2):
            model(x).sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(x)
    finally:
        stop()
    assert not reported


def test_each_phase_is_one_range(tmp_path: Path) -> None:
    """Of nested modules the outermost; every range is closed."""
    marks: list[str] = []
    run(tmp_path, NvtxProbe(marks.append, lambda: marks.append(")")))
    assert marks == ["data", ")", "forward", ")", "backward", ")", "optimizer", ")", "data", ")", "evaluation", ")"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Once, and the program runs."""
    run(tmp_path, NvtxProbe())
    assert capfd.readouterr().err == "ddpilot: --nvtx: there is no CUDA device, so that no ranges are marked\n"
