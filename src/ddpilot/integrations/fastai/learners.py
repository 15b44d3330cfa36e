# SPDX-License-Identifier: Apache-2.0
"""Patch fastai on a rank of a session, until the session ends: learners, and downloads, which one rank makes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.hub
from fastai import basics, torch_core
from fastai import learner as learner_module
from fastai.callback import all as _all_callbacks  # noqa: F401  # loaded before names are replaced in all modules
from fastai.callback.core import GatherPredsCallback
from fastai.callback.progress import CSVLogger
from fastai.callback.schedule import LRFinder
from fastai.learner import Learner, Recorder
from fastcore.basics import defaults
from fastprogress import fastprogress
from fastprogress.fastprogress import MasterBar, ProgressBar

from ddpilot.environments.private_files import lock_file, make_own_folder, open_own_file, own_temporary_folder
from ddpilot.errors import GroupError
from ddpilot.group.process_group import Group
from ddpilot.integrations.fastai.callbacks import ShareData, TrainTogether, is_shared
from ddpilot.integrations.fastai.loaders import can_share, own_random, start_equal
from ddpilot.integrations.fastai.metrics import collect_predictions, count_batch
from ddpilot.integrations.libraries import holders, replace, wrap
from ddpilot.session.apps import AppContext

_IN_NOTEBOOK = "JPY_PARENT_PID"  # set in kernels started by Jupyter, and thus in their ranks


def adapt_learners(context: AppContext) -> None:
    """Let learners on this rank train and evaluate together with those of the other ranks."""
    if context.seed is None:
        start_equal(os.environ["TORCHELASTIC_RUN_ID"])
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    replace(context.cleanup, defaults, "cpus", max(1, defaults.cpus // local_ranks))
    _replace_everywhere(context, "untar_data", functools.partial(untar_once, basics.untar_data))
    wrap(context.cleanup, torch.hub, "download_url_to_file", download_once)
    if context.world_size > 1:
        _adapt_work(context)
        _adapt_files(context)
    _choose_bars(context)


def _adapt_work(context: AppContext) -> None:
    cleanup = context.cleanup
    wrap(cleanup, Learner, "fit", functools.partial(_fit, context))
    wrap(cleanup, Learner, "validate", functools.partial(_evaluate, context))
    wrap(cleanup, Learner, "get_preds", functools.partial(_evaluate, context))
    wrap(cleanup, Recorder, "after_batch", count_batch)
    wrap(cleanup, GatherPredsCallback, "after_validate", collect_predictions)
    # Once WORLD_SIZE is set, fastai gathers whatever is detached, also values that only one rank has.
    replace(cleanup, torch_core, "maybe_gather", lambda tensor, axis=0: tensor)
    if find_spec("accelerate") is not None:
        importlib.import_module("fastai.distributed")
        replace(cleanup, Learner, "distrib_ctx", _unchanged)
        replace(cleanup, Learner, "to_distributed", lambda learn, *args, **kwargs: learn)


def _adapt_files(context: AppContext) -> None:
    def barrier() -> None:
        if context.is_everywhere():
            context.enter_group().barrier()

    _replace_everywhere(context, "distrib_barrier", barrier)
    # LRFinder saves its files per rank: otherwise only rank 0 would save, and other ranks could not load.
    for name in ("before_fit", "after_fit"):
        wrap(context.cleanup, LRFinder, name, _as_one_process)


def _choose_bars(context: AppContext) -> None:
    """Show progress bars on rank 0 only, as HTML if the parent is a Jupyter kernel. Other ranks write no CSV log."""
    bars = (SilentBar, SilentMasterBar)
    if context.rank:
        wrap(context.cleanup, CSVLogger, "before_fit", lambda original, logger: setattr(logger, "run", False))
    elif _IN_NOTEBOOK in os.environ:
        bars = (fastprogress.NBProgressBar, fastprogress.NBMasterBar)
    else:
        return
    for name, bar in zip(("progress_bar", "master_bar"), bars, strict=True):
        _replace_everywhere(context, name, bar)
        replace(context.cleanup, fastprogress, name, bar)


def _replace_everywhere(context: AppContext, name: str, value: Any) -> None:
    for module in holders("fastai", name, getattr(basics, name)):
        replace(context.cleanup, module, name, value)


def _fit(context: AppContext, original: Callable[..., Any], learn: Any, *args: Any, **kwargs: Any) -> Any:
    if is_shared(learn):
        return original(learn, *args, **kwargs)
    if not context.is_everywhere():
        raise GroupError(
            "fitting a Learner",
            found="this cell does not run on all ranks, so the models of the other ranks would not be trained",
            fix="Run the cell on all ranks",
            rank=context.rank,
        )
    group = context.enter_group()
    with own_random(group), _together(learn, group):
        return original(learn, *args, **kwargs)


@contextlib.contextmanager
def _together(learn: Any, group: Group) -> Iterator[None]:
    together = TrainTogether(group)
    logger = learn.logger
    with learn.added_cbs([ShareData(group), together]):
        try:
            yield
        except BaseException:
            learn.logger = logger
            learn.model.zero_grad(set_to_none=True)
            learn._end_cleanup()
            raise
        finally:
            together.release()


def _evaluate(
    context: AppContext, original: Callable[..., Any], learn: Any, ds_idx: int = 1, dl: Any = None, **kwargs: Any
) -> Any:
    """Evaluate on all ranks together if all run this cell and there is a sample for each; else on each rank alone."""
    loader = learn.dls[ds_idx] if dl is None else dl
    if is_shared(learn) or not context.is_everywhere() or not can_share(loader, context.world_size):
        return original(learn, ds_idx, dl, **kwargs)
    with learn.added_cbs([ShareData(context.enter_group())]):
        return original(learn, ds_idx, dl, **kwargs)


@contextlib.contextmanager
def _unchanged(learn: Any, *_args: Any, **_kwargs: Any) -> Iterator[Any]:
    yield learn


def _as_one_process(original: Callable[[Any], None], finder: Any) -> None:
    with contextlib.ExitStack() as until_done:
        replace(until_done, learner_module, "rank_distrib", lambda: 0)
        replace(until_done, learner_module, "distrib_barrier", lambda: None)
        original(finder)


class SilentBar(ProgressBar):  # type: ignore[misc]  # fastprogress is untyped
    """A progress bar that displays nothing."""


class SilentMasterBar(MasterBar):  # type: ignore[misc]  # fastprogress is untyped
    """A master bar that displays nothing."""

    pcls = SilentBar

    def __init__(self, gen: Any, total: int | None = None, **_style: Any) -> None:
        super().__init__(gen, SilentBar, total)

    def write(self, line: Any, table: bool = False) -> None:
        """Do nothing."""

    def show_imgs(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Context manager: hold the lock `name`, which one process of this user on this machine can hold at a time.

    This is a lock and not a barrier, as a rank that comes later may find the file and never call this. No lock is
    taken if this user cannot have a folder in the temporary directory, for example if another user has taken its name.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    path = own_temporary_folder() / f"{digest}.lock"
    fd = None
    with contextlib.suppress(OSError):
        make_own_folder(path.parent)
        fd = _locked(path)
    try:
        yield
    finally:
        if fd is not None:
            path.unlink(missing_ok=True)
            os.close(fd)


def _locked(path: Path) -> int:
    while True:
        fd = open_own_file(path, os.O_RDWR | os.O_CREAT)
        try:
            lock_file(fd)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the process that held the lock has removed the file


def untar_once(original: Callable[..., Path], url: str, *args: Any, **kwargs: Any) -> Path:
    """Wrap `untar_data` on a rank."""
    with one_at_a_time(url):
        return original(url, *args, **kwargs)


def download_once(original: Callable[..., None], url: str, dst: str, *args: Any, **kwargs: Any) -> None:
    """Run `torch.hub.download_url_to_file` on one rank of this machine at a time, unless `dst` exists by then.

    Callers check for `dst` before they call this, when another rank may still be downloading it.
    """
    with one_at_a_time(dst):
        if not os.path.exists(dst):
            original(url, dst, *args, **kwargs)
