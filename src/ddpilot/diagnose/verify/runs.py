# SPDX-License-Identifier: Apache-2.0
"""`Runs`: the runs of one program on one rank and on several, made comparable, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from ddpilot.diagnose.updates.record import RecordSpec
from ddpilot.diagnose.verify.differences import (
    Difference,
    all_samples,
    are_same_batches,
    compare_runs,
    count_samples,
    largest,
)
from ddpilot.diagnose.verify.target import Run, Runner

EXACT = 1e-6
"""Relative differences up to this are rounding in float32, whatever the program."""
_GROWTH = 16.0
"""How much larger than the effect of one unit in the last place a difference may be that rounding explains."""
_SHARE_IN_FLOAT64 = 1e-3
"""A difference that is this much smaller in float64 is rounding."""


class Runs:
    """Runs of the program of `runner` on one rank and on `nproc_per_node`, of which each is made once.

    `show` is called with a line about what is run.
    """

    def __init__(
        self, runner: Runner, nproc_per_node: int, num_updates: int | None, show: Callable[[str], None]
    ) -> None:
        self._runner = runner
        self._show = show
        self.nproc_per_node = nproc_per_node
        self.spec = RecordSpec(num_updates=num_updates)
        """What all compared runs have in common."""
        self.parallel = self._run(nproc_per_node, self.spec, "as it is")
        """The program on all ranks; at first as it is."""
        self.original = self.parallel
        """The program as it is, on all ranks."""
        self.single = self.parallel
        self.notes: list[str] = []
        self.draws: set[str] = set()
        """Names of generators that the program draws from in training, apart from dropout."""
        self.num_compared: int | None = None
        """Updates that can be compared; None: all."""
        self.is_same_size = True
        """False if the updates of one rank have fewer samples, and could not be made larger."""

    def make_comparable(self) -> None:
        """Run the program on one rank, on the same samples; without dropout on both sides if the program has it."""
        self._remove_chance()
        program = self.parallel.ranks[0].program
        is_divided = any("Distributed" in sampler or "Shard" in sampler for sampler in program.samplers)
        self._run_single(self.nproc_per_node if is_divided else 1)
        factor = self._missing_factor()
        if factor is not None:
            self._run_single(factor)
        if self._has_other_order():
            self.notes.append(
                "RandomSamplers had an order of their own in the compared runs: with Accelerate, it depends on the "
                "number of ranks unless `use_seedable_sampler` is set"
            )
            self._change_all("with an order of its own", orders_alike=True)
            self._run_single(self.single.spec.replicas)
        if self._can_take_turns():
            self._take_turns()
        if self.single.spec.replicas > 1 and not self.single.spec.takes_turns:
            self.notes.append(
                f"one rank had batches {self.nproc_per_node} times as large: the program's batch size is per rank"
            )

    def _remove_chance(self) -> None:
        """Run all ranks again without dropout, scaled losses and random numbers, as far as the program has them."""
        programs = [record.program for record in self.parallel.ranks]
        if any(each.num_dropped_out for each in programs):
            self.notes.append("dropout was off in the compared runs: its masks depend on how batches are divided")
            self._change_all("without dropout", has_dropout=False)
        if any(each.has_scaler for each in programs):
            self.notes.append("GradScaler was off in the compared runs: which steps it skips depends on the batches")
            self._change_all("without GradScaler", scales_losses=False)
        self.draws = {name for record in self.parallel.ranks for name in record.program.draws}
        if self.draws - {"numpy", "random"} and not self.parallel.error:
            self.notes.append(
                "random numbers that the program draws in training were the same for each row in the compared runs"
            )
            self._change_all("with random numbers that are alike", draws_alike=True)

    def _change_all(self, how: str, **changes: Any) -> None:
        self.spec = replace(self.spec, **changes)
        self.parallel = replace(self._run(self.nproc_per_node, self.spec, how), findings=self.parallel.findings)

    def _has_other_order(self) -> bool:
        """True if Accelerate has divided an order of samples that one rank does not have."""
        if not (self.single.num_updates and self.parallel.num_updates):
            return False
        is_divided = "BatchSamplerShard" in self.parallel.ranks[0].program.samplers
        return is_divided and all_samples(self.single, 0) != all_samples(self.parallel, 0)

    def _can_take_turns(self) -> bool:
        """True if each rank has a batch of the size that one rank has, and no factor makes up for it."""
        if not (self.single.num_updates and self.parallel.num_updates) or are_same_batches(self.parallel, 0):
            return False
        one, all_ = (count_samples(each, 0).total for each in (self.single, self.parallel))
        return one > 0 and all_ == one * self.nproc_per_node

    def _take_turns(self) -> None:
        """Compare with one rank that takes the batches of an update in turn, where they are then the same samples."""
        if all_samples(self.by_turns, 0) != all_samples(self.parallel, 0):
            self.is_same_size = False
            return
        self.single = self.by_turns
        self.notes.append(
            f"one rank took the mean of the gradients of {self.nproc_per_node} batches in turn: the program makes its "
            "batches itself, so that larger ones cannot be had"
        )

    def _run_single(self, replicas: int) -> None:
        self.single = self._run(1, replace(self.spec, replicas=replicas), "on the same samples")

    def _missing_factor(self) -> int | None:
        """Return how many times larger the batches of one rank must be; None if they are as they should be."""
        if not (self.single.num_updates and self.parallel.num_updates) or are_same_batches(self.parallel, 0):
            return None
        one, all_ = (count_samples(each, 0).total for each in (self.single, self.parallel))
        replicas = self.single.spec.replicas
        if not one or not all_ or one == all_:
            return None
        factor = round(replicas * all_ / one)
        return factor if factor != replicas and factor in (1, self.nproc_per_node) else None

    def _run(self, nproc: int, spec: RecordSpec, how: str) -> Run:
        self._show(f"run {self._runner.num_runs + 1}: {nproc} rank{'s' * (nproc > 1)}, {how}")
        return self._runner.run(nproc, spec)

    def stop_at_padding(self, update: int) -> bool:
        """True if a sampler has repeated or dropped samples in `update` to make equal parts; no more is compared."""
        samplers = self.parallel.ranks[0].program.samplers
        if not any("Distributed" in each or "Shard" in each for each in samplers):
            return False
        one, all_ = all_samples(self.single, update), all_samples(self.parallel, update)
        repeated, dropped = (all_ - one).total(), (one - all_).total()
        if repeated + dropped == 0 or (repeated and dropped) or repeated + dropped >= self.nproc_per_node:
            return False
        self.num_compared = update
        how = f"repeats {repeated}" if repeated else f"leaves out {dropped}"
        why = f"the sampler {how} of its samples, so that all ranks have as many"
        self.notes.append(f"from update {update + 1} on nothing is compared: {why}")
        return True

    def differences(self) -> list[list[Difference]]:
        """Return what differs between `single` and `parallel`, for each update that is compared."""
        return compare_runs(self.single, self.parallel)[: self.num_compared]

    # Noise

    @cached_property
    def repeated(self) -> Run:
        """`single` once more."""
        return self._run(1, self.single.spec, "once more")

    @cached_property
    def perturbed(self) -> Run:
        """`single` with gradients that are changed in their last place."""
        return self._run(1, replace(self.single.spec, perturbs=True), "with gradients changed in their last place")

    @cached_property
    def in_float64(self) -> tuple[Run, Run]:
        """Both runs in float64."""
        how = "in float64"
        return (
            self._run(1, replace(self.single.spec, is_float64=True), how),
            self._run(self.nproc_per_node, replace(self.parallel.spec, is_float64=True), how),
        )

    @cached_property
    def noise(self) -> float:
        """The largest effect of one unit in the last place of the gradients, on any update."""
        return max(
            (largest(each, "gradient", "after") for each in compare_runs(self.single, self.perturbed)), default=0.0
        )

    def is_rounding(self, differences: list[list[Difference]], num_updates: int) -> bool:
        """True if rounding explains what differs between `single` and `parallel` in the first `num_updates`."""
        size = largest_of(differences[:num_updates])
        if size <= EXACT:
            return True
        precise = self.difference_in_float64(num_updates)
        if precise is not None:
            return precise <= _SHARE_IN_FLOAT64 * size
        return size <= _GROWTH * max(self.noise, EXACT)

    def difference_in_float64(self, num_updates: int) -> float | None:
        """Return the largest difference in the first `num_updates` in float64; None if the program fails with it."""
        one, all_ = self.in_float64
        if one.error or all_.error or min(one.num_updates, all_.num_updates) < num_updates:
            return None
        return largest_of(compare_runs(one, all_)[:num_updates])

    def floors(self) -> dict[str, float]:
        """Return the noise that has been measured so far, by the name of what was compared."""
        found = {"same run twice": largest_of(compare_runs(self.single, self.repeated))}
        if "perturbed" in vars(self):
            found["gradients changed in their last place"] = self.noise
        if "in_float64" in vars(self) and (precise := self.difference_in_float64(1)) is not None:
            both = min(each.num_updates for each in self.in_float64)
            found["1 rank and all ranks in float64"] = self.difference_in_float64(both) or precise
        return found

    # Experiments

    @cached_property
    def without_batch_statistics(self) -> tuple[Run, Run]:
        """Both runs with BatchNorm layers that use their running statistics."""
        how = "without batch statistics"
        return (
            self._run(1, replace(self.single.spec, has_batch_statistics=False), how),
            self._run(self.nproc_per_node, replace(self.parallel.spec, has_batch_statistics=False), how),
        )

    @cached_property
    def with_weights(self) -> Run:
        """The run on all ranks, with losses that are weighted by the ranks' numbers of rows."""
        return self._run(self.nproc_per_node, replace(self.parallel.spec, weighs_rows=True), "with weighted losses")

    @cached_property
    def by_turns(self) -> Run:
        """One rank that computes the gradient of each rank's batch in turn, and steps with their mean."""
        spec = replace(self.single.spec, replicas=self.nproc_per_node, takes_turns=True)
        return self._run(1, spec, "with the batches of all ranks in turn")

    def agrees_by_turns(self, update: int) -> bool:
        """True if `by_turns` has the gradients of `parallel` up to `update`, on the same samples."""
        if self.single.spec.takes_turns or not all_samples(self.parallel, update):
            return False
        is_complete = not self.by_turns.error and self.by_turns.num_updates > update
        if not is_complete or all_samples(self.by_turns, update) != all_samples(self.parallel, update):
            return False
        return self._have_same_gradients(self.by_turns, self.parallel, update)

    def agrees_with_weights(self, update: int) -> bool:
        """True if weights by rows give the gradients of `single` up to `update`."""
        rows = {record.updates[update].num_rows for record in self.parallel.ranks}
        if len(rows) < 2 or self.with_weights.error or self.with_weights.num_updates <= update:
            return False
        return self._have_same_gradients(self.single, self.with_weights, update)

    def _have_same_gradients(self, one: Run, other: Run, update: int) -> bool:
        found = compare_runs(one, other)[: update + 1]
        return max((largest(each, "gradient") for each in found), default=0.0) <= _GROWTH * max(self.noise, EXACT)


def largest_of(differences: list[list[Difference]]) -> float:
    """Return the size of the largest difference of a gradient or of a parameter after its step."""
    return max((largest(each, "gradient", "after") for each in differences), default=0.0)
