# SPDX-License-Identifier: Apache-2.0
"""The causes of diverging ranks: reason and fix of each."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """A code with its texts."""

    code: str
    why: str
    fix: str


_RUNS_APART = "DDP averages gradients only in the backward of a forward that went through the wrapper"

BYPASS = Cause(
    "DDP321",
    f"the model inside DDP was called directly: {_RUNS_APART}, so that each rank trains on its own data alone",
    "Call the DDP model itself, `ddp(x)` instead of `ddp.module(x)`; to reach another method, call it inside `forward`",
)
TWO_FORWARDS = Cause(
    "DDP322",
    "two forwards came before two backwards: DDP reduces one backward after each group of forwards, the first; the "
    "second one's gradients stay local",
    "Call backward once, on the sum of the losses, or each loss's backward before the next forward; or put all but the "
    "last forward and backward into `no_sync()`",
)
NO_SYNC = Cause(
    "DDP323",
    "the last backward before this step ran for a forward inside `no_sync()`, which is where gradients stay local",
    "Leave `no_sync()` for the last micro-batch before each step, with its forward and its backward outside, also for "
    "the last, shorter group of an epoch",
)
TWICE = Cause(
    "DDP329",
    "backward ran twice for one forward: DDP reduced the first, the second one's gradients stay local",
    "Add the losses and call backward once, without `retain_graph=True`",
)
LATE = Cause(
    "DDP332",
    "DDP averages the parameters that the model had, and that were trainable, when it was wrapped; these came later or "
    "were unfrozen later",
    "Change or unfreeze layers first, and wrap the model in DDP again afterwards",
)
MOVED = Cause(
    "DDP331",
    "the model was moved to another device or dtype after it was wrapped: DDP's hooks stay with what it was before, "
    "and gradients are not reduced any more",
    "Move first, then wrap: `DDP(model.to(device))`",
)
STEP = Cause(
    "DDP326",
    "the optimizer took a step on some ranks only; gradients were the same on all of them",
    "Call `optimizer.step()` on every rank, and skip a step on all ranks or on none (reduce the condition first)",
)
PARAMETERS = Cause(
    "DDP325",
    "gradients are the same on all ranks and parameters are not: DDP copies rank 0's when it wraps a model and never "
    "again, so that one rank's have been loaded, initialised or changed since; or an error interrupted an update, "
    "which not all ranks finished",
    "Load or initialise before the model is wrapped, or on every rank alike; after an interrupted update, load a "
    "checkpoint on all ranks",
)
RATES = Cause(
    "DDP325",
    "gradients are the same on all ranks and learning rates are not, so that each takes a step of another length: a "
    "schedule went by what only its own rank knows, such as its own loss or number of samples",
    "Reduce what the schedule goes by before it is asked, and step it on every rank alike",
)
CHANGED = Cause(
    "DDP325",
    "parameters were the same on all ranks before, and gradients are: since then parameters, the optimizer's state or, "
    "for a step, gradients or learning rates were changed, loaded or zeroed on some ranks only, or on each with random "
    "numbers or data of its own",
    "Change and load them on every rank alike, or broadcast them afterwards; look at what runs around this step on "
    "some ranks only, or at random",
)
CHANGED_AT_END = CHANGED._replace(
    why="parameters were the same on all ranks before, and are not before the last step: since then parameters, "
    "gradients, learning rates or the optimizer's state were changed, loaded or zeroed on some ranks only, or on each "
    "with random numbers or data of its own",
)
EPOCHS = Cause(
    "DDP325",
    "gradients are the same on all ranks, and the ranks began to read their data again at different steps: what the "
    "program does between two epochs, such as a step of the schedule, came at another step on each",
    "Give every rank the same number of batches in each epoch (DistributedSampler, `drop_last=True`), or go by a "
    "number of steps that is the same on all ranks",
)
UNKNOWN = Cause(
    "DDP320",
    "every backward went through DDP, so that gradients were changed on some ranks after they were reduced",
    "Change gradients (clipping, masking, noise) on every rank alike; look at what runs between backward and step",
)
NO_BACKWARD = Cause(
    UNKNOWN.code,
    "no backward ran through DDP before this step: it all-reduces in `backward()` alone, not what "
    "`torch.autograd.grad` returns or what is written into `.grad`",
    "Call `loss.backward()` instead of `torch.autograd.grad`; or all-reduce these gradients before the step",
)
NEVER_WRAPPED = Cause(
    "DDP324",
    "no DDP model has these parameters, and no collective was large enough to average them: each rank trains a model "
    "of its own, on its own data",
    "Wrap the model, `model = DistributedDataParallel(model)`, and call it through the wrapper; where each rank is "
    "meant to train a model of its own, as in cross-validation, begin with another seed on each, and nothing is said",
)
DROPPED = Cause(
    NEVER_WRAPPED.code,
    "the model was wrapped in DDP here, and the wrapper thrown away: the program continues with the model itself, of "
    "which each rank trains its own, on its own data",
    "Keep what DDP gives, and call that: `model = DistributedDataParallel(model)`",
)
UNLIKE = Cause(
    "DDP325",
    "the program averages gradients by itself, without DDP, and the ranks began with different weights: DDP would have "
    "copied rank 0's. The same gradients keep them as far apart as they were, so that no rank has the model which the "
    "gradients are of",
    "Copy rank 0's weights before the first step: `for p in model.parameters(): dist.broadcast(p.data, src=0)`, and "
    "buffers; or make the model with the same seed on every rank, and seed by rank afterwards",
)
LEFT_OUT = Cause(
    UNKNOWN.code,
    "the program averages gradients by itself, without DDP, and leaves these out: each rank trains them on its own "
    "data alone",
    "Average the gradient of every parameter that an optimizer steps, of all modules and to the last; or wrap the "
    "modules in DDP",
)
LOCAL = {
    "no_sync": NO_SYNC,
    "forward in no_sync": NO_SYNC,
    "two forwards": TWO_FORWARDS,
    "twice": TWICE,
    "bypass": BYPASS,
}
"""By the reason a probe gives for a backward that was not reduced."""
