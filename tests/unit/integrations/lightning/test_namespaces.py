# SPDX-License-Identifier: Apache-2.0
"""Which Lightning an object is of, without importing either."""

from __future__ import annotations

import pytest

from ddpilot.integrations.lightning.namespaces import LIGHTNING, PYTORCH_LIGHTNING, namespace_of


@pytest.mark.parametrize(
    ("module", "namespace"),
    [
        ("lightning.pytorch.strategies.ddp", LIGHTNING),
        ("lightning.fabric.strategies.ddp", LIGHTNING),
        ("pytorch_lightning.trainer.trainer", PYTORCH_LIGHTNING),
        ("lightning_fabric.fabric", PYTORCH_LIGHTNING),
    ],
)
def test_namespace_of_searches_the_base_classes(module: str, namespace: object) -> None:
    """A user's subclass is of the Lightning that its base is of."""
    base = type("Base", (), {"__module__": module})
    assert namespace_of(type("Own", (base,), {})()) == namespace


def test_namespace_of_rejects_other_classes() -> None:
    """A name that only begins like one is not it."""
    made = type("Own", (), {"__module__": "lightning_fabrics.shop"})()
    with pytest.raises(TypeError, match=r"lightning_fabrics\.shop\.Own is not a Lightning class"):
        namespace_of(made)
