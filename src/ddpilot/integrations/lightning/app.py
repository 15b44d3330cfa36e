# SPDX-License-Identifier: Apache-2.0
"""The app "lightning", also for `pytorch_lightning`. Imported in the notebook; imports neither of them, nor torch."""

from __future__ import annotations

from ddpilot.session.apps import App, AppContext


def _prepare(context: AppContext) -> None:
    from ddpilot.integrations.lightning.connectors import adapt_connectors

    adapt_connectors(context)


APP = App(
    name="lightning",
    libraries=("lightning", "pytorch_lightning"),
    install="ddpilot[lightning]",
    preload=("ddpilot.integrations.lightning.preload",),
    initializer=_prepare,
)
