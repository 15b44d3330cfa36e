# SPDX-License-Identifier: Apache-2.0
"""Every test here runs with the compiled kernels and with those in Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpilot.record.collectives import native
from ddpilot.record.collectives.recording import SOURCE_VARIABLE


@pytest.fixture(scope="module", params=["native", "kernels"], autouse=True)
def recorder(request: pytest.FixtureRequest) -> Iterator[str]:
    """What records in the ranks that the test starts."""
    source: str = request.param
    if source == "native" and not ((built := native.built_path()) is not None and built.exists()):
        pytest.skip("the compiled part of recording is not built: `ddpilot build-recorder`")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOURCE_VARIABLE, source)
        yield source
