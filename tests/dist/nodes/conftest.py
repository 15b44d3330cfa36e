# SPDX-License-Identifier: Apache-2.0
"""An ssh server for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.nodes.ssh_server import SshServer, ssh_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """The sshd of this file's tests."""
    with ssh_server(tmp_path_factory.mktemp("ssh")) as server:
        yield server
