# SPDX-License-Identifier: Apache-2.0
"""Destinations of ranks' output and reports: the `LogsSpecs` that torch elastic calls for each attempt."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import to_map

from ddpilot.launching.elastic.attempt_observer import Escort
from ddpilot.launching.elastic.options import RunOptions
from ddpilot.launching.elastic.output_thread import Pipe, Screen
from ddpilot.launching.elastic.rank_main import REPORT_VARIABLE

_STREAMS = {"stdout": Std.OUT, "stderr": Std.ERR}


class PipedLogs(LogsSpecs):
    """Directs ranks' output to the pipes of `screen`, and to files if `options` ask for them.

    `folder`: for the ranks' reports. `variables`: added to each rank's environment, like those that `escort` returns
    for the attempt.
    """

    def __init__(
        self, options: RunOptions, screen: Screen, folder: Path, variables: Mapping[str, str], escort: Escort
    ) -> None:
        redirects, tee = Std.from_str(options.redirects), Std.from_str(options.tee)
        if options.log_dir is not None and redirects == tee == Std.NONE:
            tee = Std.ALL
        super().__init__(str(folder), redirects, tee)
        self._options = options
        self._screen = screen
        self._folder = folder
        self._variables = variables
        self.escort = escort
        self._log_dir: Path | None = None
        self.reports: dict[int, Path] = {}
        """Report file of each local rank in the current attempt."""

    @property
    def root_log_dir(self) -> str:
        """The folder of the reports."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create pipes, files and variables for one attempt; torch calls this before it starts the ranks."""
        numbers = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        attempt = f"attempt_{envs[0]['TORCHELASTIC_RESTART_COUNT']}"
        self.reports = {local_rank: self._folder / f"{attempt}_rank_{local_rank}.json" for local_rank in envs}
        escorted = self.escort.begin_attempt(int(envs[0]["WORLD_SIZE"]), tuple(sorted(numbers.values())))
        for local_rank, env in envs.items():
            env.update({**self._variables, **escorted})
            env[REPORT_VARIABLE] = str(self.reports[local_rank])
        redirects, tee = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        paths: dict[str, dict[int, str]] = {"stdout": {}, "stderr": {}}
        piped: list[Pipe] = []
        copies: dict[Pipe, Path] = {}
        for local_rank, rank in numbers.items():
            for stream, bit in _STREAMS.items():
                if redirects[local_rank] & bit and not tee[local_rank] & bit:
                    paths[stream][local_rank] = str(self._file(attempt, local_rank, stream))
                    continue
                piped.append((rank, stream))
                if tee[local_rank] & bit:
                    copies[rank, stream] = self._file(attempt, local_rank, stream)
        wanted = self._options.shown_local_ranks
        shown = None if wanted is None else {rank for local_rank, rank in numbers.items() if local_rank in wanted}
        sources = self._screen.begin_attempt(list(numbers.values()), piped, copies, shown)
        for rank, stream in piped:
            local_rank = next(each for each, number in numbers.items() if number == rank)
            paths[stream][local_rank] = sources[rank, stream]
        reports = {local_rank: str(path) for local_rank, path in self.reports.items()}
        return LogsDest(stdouts=paths["stdout"], stderrs=paths["stderr"], error_files=reports)

    def _file(self, attempt: str, local_rank: int, stream: str) -> Path:
        """Path in torchrun's layout: <log dir>/<run id>_<unique>/attempt_0/<local rank>/stdout.log."""
        if self._log_dir is None:
            base = self._options.log_dir
            if base is not None:
                base.mkdir(parents=True, exist_ok=True)
            name = self._options.rdzv_id.replace("/", "_")
            self._log_dir = Path(tempfile.mkdtemp(prefix=f"{name}_", dir=base))
            self._screen.note(f"output goes to {self._log_dir}")
        folder = self._log_dir / attempt / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{stream}.log"
