# SPDX-License-Identifier: Apache-2.0
"""Other ways to keep ranks for a notebook: ipyparallel's engines and nbdistributed's workers, two ranks each.

Both start their processes anew each time. They come with the extra `bench`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NUM_RANKS = 2
_ASK_AGAIN_S = 0.25
_ANSWER_LIMIT_S = 60.0

Execute = Callable[[str], object]

ALL_REDUCE = "import torch\nones = torch.ones(1)\ntorch.distributed.all_reduce(ones)\nassert ones.item() == {num_ranks}"
"""What every rank does first."""


@contextlib.contextmanager
def ipyparallel_ranks() -> Iterator[Execute]:
    """A cluster of engines in a gloo group on a port of its own. `Execute` runs code on all of them."""
    import ipyparallel

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with ipyparallel.Cluster(n=NUM_RANKS, log_level=logging.ERROR) as client:
        view = client[:]
        view.scatter("rank", range(NUM_RANKS), flatten=True, block=True)

        def execute(code: str) -> object:
            return view.execute(code, silent=True, block=True)

        execute(
            "import torch.distributed as dist\n"
            f"dist.init_process_group('gloo', init_method='tcp://127.0.0.1:{port}', rank=rank, world_size={NUM_RANKS})"
        )
        yield execute


@contextlib.contextmanager
def nbdistributed_ranks() -> Iterator[Execute]:
    """What `%dist_init` does. A cell that is sent before the workers have connected is lost and waited for 30 s.

    Here a small one is sent every quarter of a second until it is answered.
    """
    from nbdistributed.communication import CommunicationManager
    from nbdistributed.process_manager import ProcessManager

    path = os.environ["PATH"]
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"  # it starts whatever `python` is
    workers = ProcessManager()
    try:
        channel = CommunicationManager(NUM_RANKS, workers.start_workers(NUM_RANKS))

        def execute(code: str, limit_s: float = _ANSWER_LIMIT_S) -> object:
            answers = channel.send_to_all("execute", code, timeout=limit_s)
            failed = [answer["error"] for answer in answers.values() if answer.get("error")]
            if failed:
                raise RuntimeError(failed[0])
            return answers

        _await_first_answer(lambda: execute("1 + 1", _ASK_AGAIN_S))
        yield execute
        channel.shutdown()
    finally:
        os.environ["PATH"] = path
        with contextlib.redirect_stdout(io.StringIO()):
            workers.shutdown()


def _await_first_answer(ask: Callable[[], object]) -> None:
    end = time.monotonic() + _ANSWER_LIMIT_S
    while True:
        try:
            ask()
        except TimeoutError:
            if time.monotonic() > end:
                raise
        else:
            return


PEERS = {"ipyparallel": ipyparallel_ranks, "nbdistributed": nbdistributed_ranks}
