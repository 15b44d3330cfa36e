# SPDX-License-Identifier: Apache-2.0
"""Check the environment variables: the topology that they describe, and combinations that are known to be bad."""

from __future__ import annotations

from ddpilot.diagnose.combinations import COMBINATIONS
from ddpilot.diagnose.facts import Answers, Facts, explain_error
from ddpilot.environments.detect import detect_topology
from ddpilot.environments.variables import quote
from ddpilot.errors import TopologyError
from ddpilot.findings.catalog import make_finding

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_DIST", "TORCH_CPP", "CUDA_", "OMP_", "MKL_", "DDPILOT_", "UCX_")


def topology(facts: Facts) -> Answers:
    """Rank and sizes as the variables describe them, and how they were found."""
    try:
        found = detect_topology(facts.environ)
    except TopologyError as error:
        yield explain_error(error, "DDP101")
    else:
        sizes = f"rank {found.rank} of {found.world_size} on {found.nnodes} node(s): " if found.is_distributed else ""
        yield f"{sizes}{found.how}"


def variables(facts: Facts) -> Answers:
    """The variables that change how ranks communicate or compute."""
    names = sorted(name for name in facts.environ if name.startswith(_PREFIXES))
    yield quote(facts.environ, *names) or "no variable of NCCL, gloo, CUDA or OpenMP is set"


def combinations(facts: Facts) -> Answers:
    """Settings and versions that are known not to work together."""
    is_bad = False
    for known in COMBINATIONS:
        if found := known.applies(facts):
            is_bad = True
            yield make_finding(
                known.code,
                summary=f"{found}: {known.consequence}",
                why=f"known from {known.source}",
                fix=known.fix,
                severity=known.severity,
            )
    if not is_bad:
        yield f"none of the {len(COMBINATIONS)} known bad ones"
