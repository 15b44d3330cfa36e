# SPDX-License-Identifier: Apache-2.0
"""The app "fastai". Imported in the notebook; imports neither fastai nor torch."""

from __future__ import annotations

from ddpilot.module_names import FASTAI_PRELOAD
from ddpilot.session.apps import App, AppContext


def _prepare(context: AppContext) -> None:
    from ddpilot.integrations.fastai.learners import adapt_learners

    adapt_learners(context)


APP = App(
    name="fastai",
    libraries=("fastai",),
    install="ddpilot[fastai]",
    preload=(FASTAI_PRELOAD,),
    initializer=_prepare,
)
