# SPDX-License-Identifier: Apache-2.0
"""`RunningProfile`: profile a part of a program from within, on all ranks together."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from ddpilot.environments.private_files import scratch_folder
from ddpilot.errors import RecordError
from ddpilot.findings.display import Findings
from ddpilot.group.protocol import GroupLike
from ddpilot.profiler.pictures.profile_page import render_page
from ddpilot.profiler.rank.probe import start_recording
from ddpilot.profiler.result import Profile, make_profile
from ddpilot.profiler.spans_file import read_times

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RunningProfile:
    """Context manager that profiles the updates made while it is entered. Collective on exit.

    After the exit every rank has the profile of all ranks: `profile` is it, and `summary`, `findings`, `to_html`,
    `plot` and the display are its own. If the block raises an exception nothing is exchanged, and there is no profile.
    If a rank made fewer than 6 updates, training continues: the texts and the report state it, and `profile`,
    `findings` and `plot` raise RecordError.
    """

    def __init__(self, group: GroupLike, models: Iterable[DistributedDataParallel] = ()) -> None:
        self._group = group
        self._models = tuple(models)
        self._profile: Profile | None = None
        self._error: RecordError | None = None
        self._stack = ExitStack()
        self._stop: Callable[[], None] = lambda: None

    @property
    def profile(self) -> Profile:
        """The profile of all ranks. Raises RecordError before the block has ended, and after too few updates."""
        if self._error is not None:
            raise self._error
        if self._profile is None:
            found = "the block that is profiled has not ended, or ended with an error"
            raise RecordError("reading a profile", found=found, fix="Read it after the `with` block")
        return self._profile

    @property
    def absence(self) -> str:
        """Reason why the block has no profile, as a sentence; "" if it has one."""
        return "" if self._error is None else f"no profile: {self._error.found}"

    @property
    def summary(self) -> str:
        """The text of one screen."""
        return self.absence or self.profile.summary

    @property
    def findings(self) -> Findings:
        """What makes updates slow, the most expensive first."""
        return self.profile.findings

    def to_html(self, path: str | Path, *, title: str = "Profile") -> None:
        """Write the report with its pictures to `path`, on this rank."""
        if self.absence:
            Path(path).write_text(render_page(title, self._repr_html_()), "utf-8")
        else:
            self.profile.to_html(path, title=title)

    def plot(self) -> Figure:
        """Return a matplotlib figure of the profile. Raises RecordError if matplotlib is not installed."""
        return self.profile.plot()

    def __enter__(self) -> RunningProfile:
        self._folder = self._stack.enter_context(scratch_folder("ddpilot-profile-"))
        self._stop = start_recording(self._folder, self._group.rank, self._models)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: Any) -> None:
        with self._stack:
            self._stop()
            if kind is None:
                times = self._group.all_gather_object(read_times(self._folder, self._group.rank))
                try:
                    self._profile = make_profile(times)
                except RecordError as error:  # the same on all ranks; what has been trained is not lost for it
                    self._error = error

    def __str__(self) -> str:
        return self.absence or str(self.profile)

    def __repr__(self) -> str:
        return "RunningProfile()" if self._profile is None else repr(self._profile)

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.absence)}</p>" if self.absence else self.profile._repr_html_()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self) if self.absence or self._profile is not None else repr(self))
