# SPDX-License-Identifier: Apache-2.0
"""The causes of diverging ranks: reason and fix of each."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """A code, with texts that replace those of its page."""

    code: str
    why: str | None = None
    fix: str = ""


BYPASS = Cause("DDP321")
TWO_FORWARDS = Cause("DDP322")
NO_SYNC = Cause("DDP323")
TWICE = Cause("DDP329")
LATE = Cause("DDP332")
MOVED = Cause("DDP331")
STEP = Cause("DDP326")
PARAMETERS = Cause("DDP325")
RATES = Cause(
    "DDP325",
    "gradients are the same on all ranks and learning rates are not: the schedule depends on a value that differs "
    "between ranks, such as the local loss or number of samples",
    "Reduce the value that the schedule uses, and step the schedule on every rank",
)
SETTINGS = Cause(
    "DDP325",
    "gradients are the same on all ranks and the settings of the optimizer are not: each rank makes a different update",
    "Create the optimizer with the same class and settings on every rank",
)
CHANGED = Cause(
    "DDP325",
    "parameters were the same on all ranks before, and gradients are: since then parameters, the optimizer's state or, "
    "for one step, gradients or learning rates were changed, loaded or zeroed on some ranks only, or on each rank with "
    "its own random numbers or data",
    "Change and load them identically on every rank, or broadcast them afterwards; look at what runs around this step "
    "on some ranks only, or at random",
)
CHANGED_AT_END = CHANGED._replace(
    why="parameters were the same on all ranks before, and are not before the last step: since then parameters, "
    "gradients, learning rates or the optimizer's state were changed, loaded or zeroed on some ranks only, or on each "
    "rank with its own random numbers or data",
)
EPOCHS = Cause(
    "DDP325",
    "gradients are the same on all ranks, and the ranks began a new epoch at different steps: what the program does "
    "between two epochs, such as a step of the schedule, happened at a different step on each",
    "Give every rank the same number of batches in each epoch (DistributedSampler, or ddpilot's Loop), or use a "
    "number of steps that is the same on all ranks",
)
UNKNOWN = Cause("DDP320")
NO_BACKWARD = Cause(
    UNKNOWN.code,
    "no backward ran through DDP before this step: DDP all-reduces only in `backward()`, not what "
    "`torch.autograd.grad` returns or what is written into `.grad`",
    "Call `loss.backward()` instead of `torch.autograd.grad`; or all-reduce these gradients before the step",
)
NEVER_WRAPPED = Cause("DDP324")
_WRAP = (
    "Wrap the model in DDP, after `ddpilot.init_group()` or `dist.init_process_group()`, and divide the data by a "
    "DistributedSampler; or use ddpilot.Loop, which does both"
)
NO_GROUP = NEVER_WRAPPED._replace(
    why="no rank has a process group, and no model is wrapped in DDP: each rank trains its own model",
    fix=f"{_WRAP}. If each rank should train its own model, as in cross-validation, set a different seed on each",
)
COPIES = NEVER_WRAPPED._replace(
    why="no rank has a process group, and no model is wrapped in DDP: each rank repeats the same training on the same "
    "batches",
    fix=_WRAP,
)
DROPPED = Cause(
    NEVER_WRAPPED.code,
    "the model was wrapped in DDP here, and the wrapper was discarded: the program continues with the model itself, "
    "which each rank trains on its own data",
    "Keep the DDP model and call it: `model = DistributedDataParallel(model)`",
)
UNLIKE = Cause(
    "DDP325",
    "the program averages gradients itself, without DDP, and the ranks began with different weights: DDP would have "
    "copied rank 0's. Equal gradients keep the weights as far apart as they were, so the gradients belong to none of "
    "the ranks' models",
    "Copy rank 0's weights before the first step: `for p in model.parameters(): dist.broadcast(p.data, src=0)`, and "
    "buffers; or create the model with the same seed on every rank, and seed by rank afterwards",
)
LEFT_OUT = Cause(
    UNKNOWN.code,
    "the program averages gradients itself, without DDP, and omits these: each rank trains them on its own data alone",
    "Average the gradient of every parameter that an optimizer steps, of all modules; or wrap the modules in DDP",
)
LOCAL = {
    "no_sync": NO_SYNC,
    "forward in no_sync": NO_SYNC,
    "two forwards": TWO_FORWARDS,
    "twice": TWICE,
    "bypass": BYPASS,
}
"""By the reason a probe gives for a backward that was not reduced."""
