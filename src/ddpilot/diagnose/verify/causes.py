# SPDX-License-Identifier: Apache-2.0
"""Find why several ranks compute other numbers than one: what differs first, and which experiment removes it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ddpilot.diagnose.verify.differences import (
    Difference,
    all_samples,
    are_same_batches,
    are_same_inputs,
    compare_ranks,
    compare_runs,
    content_by_sample,
    count_samples,
    largest,
)
from ddpilot.diagnose.verify.runs import EXACT, Runs
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.user_files import CodeLine, label_cell

_MAX_NAMED = 5
_ROUNDED = 1e-4
"""Norm of a gradient, relative to the largest norm, below which it may be rounding alone."""
_BETWEEN_RANKS = 1e-5
"""Relative difference between ranks that have exchanged gradients: they are equal, or rounded in another order."""


def find_start_fault(runs: Runs) -> Finding | None:
    """Return a finding if parameters differ before the first update: between ranks, or with the number of ranks."""
    parallel = runs.parallel
    between = [(rank, each) for rank, each in compare_ranks(parallel, 0) if each.kind == "before" and each.size > 0]
    if between:
        ranks = sorted({rank for rank, _ in between})
        return make_finding(
            "DDP325",
            summary=f"before the first update {render_ranks(ranks)} has other parameters than rank 0",
            ranks=ranks,
            line=line_at(parallel.ranks[0].updates[0].site),
            evidence=describe_differences([each for _, each in between], ("rank 0", "another rank")),
            severity="error",
        )
    with_one = [each for each in compare_runs(runs.single, parallel)[0] if each.kind == "before" and each.size > 0]
    if not with_one:
        return None
    return make_finding(
        "DDP821",
        line=line_at(parallel.ranks[0].updates[0].site),
        evidence=describe_differences(with_one, ("1 rank", f"{runs.nproc_per_node} ranks")),
    )


def find_sample_fault(runs: Runs, update: int) -> Finding | None:
    """Return a finding if the ranks together do not have the samples of one rank in `update`."""
    one, all_ = all_samples(runs.single, update), all_samples(runs.parallel, update)
    place = line_at(runs.parallel.ranks[0].updates[update].site)
    if are_same_batches(runs.parallel, update):
        if not are_same_inputs(runs.parallel, update):
            return None
        return make_finding("DDP401", ranks=range(runs.nproc_per_node), line=place, evidence=_count_lines(runs, update))
    if not all_ and _get_same_inputs(runs, update):
        evidence = "no DataLoader was read, and the arguments of the model are the same on all ranks"
        return make_finding("DDP401", ranks=range(runs.nproc_per_node), line=place, evidence=(evidence,))
    if not one or not all_ or one == all_:
        return _find_content_fault(runs, update)
    counted = count_samples(runs.parallel, update)
    if counted.num_repeated > count_samples(runs.single, update).num_repeated:
        summary = f"{counted.num_repeated} of {counted.total} samples of an update are those of another rank too"
        return make_finding(
            "DDP403", summary=summary, line=place, evidence=_count_lines(runs, update), severity="error"
        )
    return make_finding(
        "DDP822",
        summary=f"update {update + 1} has other samples on {runs.nproc_per_node} ranks than on one",
        line=place,
        evidence=(*_count_lines(runs, update), f"{sum((all_ & one).values())} samples are the same"),
    )


def _get_same_inputs(runs: Runs, update: int) -> bool:
    """True if the models of all ranks got the same, as the program is: draws are made alike in the compared runs."""
    has_all = all(len(record.updates) > update for record in runs.original.ranks)
    return has_all and any(runs.original.ranks[0].updates[update].inputs) and are_same_inputs(runs.original, update)


def _find_content_fault(runs: Runs, update: int) -> Finding | None:
    one, all_ = (content_by_sample(each, update + 1) for each in (runs.single, runs.parallel))
    changed = [sample for sample in one if sample in all_ and one[sample] != all_[sample]]
    if not changed:
        return None
    return make_finding(
        "DDP822",
        summary=f"{len(changed)} of {len(one)} samples have other content on {runs.nproc_per_node} ranks than on one",
        line=line_at(runs.parallel.ranks[0].updates[update].site),
        evidence=(
            f"such as sample {changed[0][1]} of loader {changed[0][0]}, drawn or augmented at random",
            *_describe_states(runs, update),
        ),
        fix="Seed what is drawn for a sample by epoch and index, as `loop.batches` does; or turn it off to compare",
    )


def _describe_states(runs: Runs, update: int) -> tuple[str, ...]:
    """Return a line with the generators whose states depend on the number of ranks."""
    one, all_ = (run.ranks[0].updates[update].generators for run in (runs.single, runs.parallel))
    names = ", ".join(name for name in one if one[name] != all_.get(name))
    return (f"after this update the generators of {names} have other states than on one rank",) if names else ()


def _count_lines(runs: Runs, update: int) -> tuple[str, ...]:
    one, all_ = count_samples(runs.single, update), count_samples(runs.parallel, update)
    by_rank = ", ".join(map(str, all_.by_rank))
    return (f"update {update + 1}: {one.total} samples on one rank; {by_rank} on ranks 0 to {runs.nproc_per_node - 1}",)


def find_rank_fault(runs: Runs, update: int) -> Finding | None:
    """Return a finding if the ranks step with different gradients, or get different parameters from equal ones."""
    found = [(rank, each) for rank, each in compare_ranks(runs.parallel, update) if each.size > _BETWEEN_RANKS]
    gradients = [(rank, each) for rank, each in found if each.kind == "gradient"]
    place = line_at(runs.parallel.ranks[0].updates[update].site)
    if not gradients:
        after = [(rank, each) for rank, each in found if each.kind == "after"]
        if not after:
            return None
        return make_finding(
            "DDP325",
            summary=f"the step of update {update + 1} gives other parameters on some ranks, from equal gradients",
            ranks=sorted({rank for rank, _ in after}),
            line=place,
            evidence=describe_differences([each for _, each in after], ("rank 0", "another rank")),
            severity="error",
        )
    parameters = runs.parallel.ranks[0].parameters
    alone = [each for _, each in gradients if not parameters[each.key].in_ddp]
    differing = alone or [each for _, each in gradients]
    num = len({each.key for each in differing})
    names = ", ".join(f"`{name}`" for name in list(dict.fromkeys(each.name for each in differing))[:_MAX_NAMED])
    has_ddp = any(parameter.in_ddp for parameter in parameters.values())
    # Without a DDP model, and with other gradients equal, the program reduces by hand.
    is_unwrapped = bool(alone) and (has_ddp or num == len(parameters))
    how = "which no DDP model reduces" if is_unwrapped else f"which {'DDP' if has_ddp else 'the program'} should reduce"
    return make_finding(
        "DDP324" if is_unwrapped else "DDP320",
        summary=f"the ranks step with different gradients of {num} parameter{'s' * (num > 1)}, {how}: {names}",
        ranks=range(runs.nproc_per_node),
        line=place,
        evidence=describe_differences(differing, ("rank 0", "another rank")),
        severity="error",
    )


def find_number_fault(runs: Runs, update: int, differences: Sequence[Difference]) -> Finding:
    """Return the finding about equal ranks whose numbers are not those of one rank, from `update` on."""
    gradients = [each for each in differences if each.kind == "gradient"]
    place = line_at(runs.parallel.ranks[0].updates[update].site)
    evidence = describe_differences(gradients or differences, ("1 rank", f"{runs.nproc_per_node} ranks"))
    if not gradients or largest(gradients, "gradient") <= EXACT:
        return _find_step_fault(runs, update, place, evidence)
    if (factor := _common_factor(runs, update, gradients)) is not None:
        return _describe_factor(runs, update, factor, place, evidence)
    if _is_explained_by_batch_norm(runs, update):
        more = "with running statistics in place of those of the batch, both give the same numbers"
        return make_finding("DDP408", line=place, evidence=(*evidence, more))
    rows = ", ".join(str(record.updates[update].num_rows) for record in runs.parallel.ranks)
    if runs.agrees_with_weights(update):
        more = f"the ranks have {rows} rows; with losses weighted by them, the numbers are those of one rank"
        return _describe_mean(place, (*evidence, more))
    if runs.agrees_by_turns(update):
        more = "one rank gives the same numbers if it takes the mean of the gradients of all ranks' batches"
        return _describe_mean(place, (*evidence, more))
    return make_finding("DDP826", line=place, evidence=evidence)


def _describe_mean(place: CodeLine | None, evidence: Sequence[str]) -> Finding:
    return make_finding(
        "DDP406",
        summary="the mean of the ranks' losses is not the loss of all samples",
        line=place,
        evidence=evidence,
        severity="error",
        why="DDP gives each rank the same weight; the loss is a mean of unequal numbers of samples, tokens or class "
        "weights on each rank, or no mean over samples; or gradients are clipped before they are reduced.",
        fix="Divide the sum by the count over all ranks: `loop.backward(loss, count=...)`, or all_reduce the count",
    )


def _find_step_fault(runs: Runs, update: int, place: CodeLine | None, evidence: Sequence[str]) -> Finding:
    one, all_ = (each.ranks[0].updates[update].options for each in (runs.single, runs.parallel))
    changed = [
        f"{name} of parameter group {number}: {first[name]:g} on 1 rank, {second.get(name, float('nan')):g} on "
        f"{runs.nproc_per_node} ranks"
        for number, (first, second) in enumerate(zip(one, all_, strict=False))
        for name in first
        if first[name] != second.get(name)
    ]
    if changed:
        return make_finding("DDP824", line=place, evidence=(*changed, *evidence))
    return make_finding(
        "DDP826",
        summary=f"update {update + 1} gives other parameters on {runs.nproc_per_node} ranks, from equal gradients",
        line=place,
        evidence=evidence,
    )


def _common_factor(runs: Runs, update: int, gradients: Sequence[Difference]) -> float | None:
    """Return the factor between the gradients of both runs, if it is the same for all parameters."""
    first = runs.single.ranks[0].arrays(update)
    sizes = {key.rpartition("/")[0]: array[-1] for key, array in first.items() if key.endswith("/gradient")}
    large = {key for key, size in sizes.items() if size > _ROUNDED * max(sizes.values())}
    num = len(large)
    factors = [each.scale for each in gradients if each.is_scaled and each.key in large]
    if not factors or len(factors) < 0.9 * num:
        return None
    middle = statistics.median(factors)
    return middle if all(abs(each / middle - 1) < 1e-3 for each in factors) else None


def _describe_factor(
    runs: Runs, update: int, factor: float, place: CodeLine | None, evidence: Sequence[str]
) -> Finding:
    num = runs.nproc_per_node
    summary = f"every gradient on {num} ranks is {factor:.4g} times that of one rank"
    if abs(factor * num - 1) < 1e-3 and runs.agrees_by_turns(update):
        return make_finding(
            "DDP823",
            summary=summary,
            line=place,
            evidence=evidence,
            severity="warning",
            why=f"The loss is a sum over the batch, or is divided by a constant. DDP takes the mean over {num} ranks.",
            fix="Take the mean over the batch; or multiply the loss, or the learning rate, by the number of ranks",
        )
    why = None
    if abs(factor - num) < 1e-3 * num:
        why = "Gradients are added over the ranks and not divided, or a loss is multiplied by the number of ranks."
    elif abs(factor * num - 1) < 1e-3:
        why = "Gradients are divided by the number of ranks twice: DDP has already taken their mean."
    return make_finding("DDP823", summary=summary, line=place, evidence=evidence, why=why)


def _is_explained_by_batch_norm(runs: Runs, update: int) -> bool:
    if not any(record.program.batch_norms for record in runs.parallel.ranks):
        return False
    one, all_ = runs.without_batch_statistics
    if one.error or all_.error or min(one.num_updates, all_.num_updates) <= update:
        return False
    rest = largest(compare_runs(one, all_)[update], "gradient")
    return rest < 1e-2 * largest(compare_runs(runs.single, runs.parallel)[update], "gradient")


def describe_differences(differences: Sequence[Difference], sides: tuple[str, str]) -> tuple[str, ...]:
    """Return a line for each of the largest differences, and one for how many more there are."""
    ordered = sorted({each.key: each for each in differences}.values(), key=lambda each: -each.size)
    lines = [_describe(each, sides) for each in ordered[:_MAX_NAMED]]
    return (*lines, *([f"and {len(ordered) - _MAX_NAMED} more"] if len(ordered) > _MAX_NAMED else []))


_WORDS = {"before": "parameter `{}` before", "gradient": "gradient of `{}` in", "after": "parameter `{}` after"}


def _describe(each: Difference, sides: tuple[str, str]) -> str:
    what = f"{_WORDS[each.kind].format(each.name)} update {each.update + 1}"
    if each.size == float("inf"):
        return f"{what}: {sides[0]} or {sides[1]} has none, or one that is not finite"
    factor = f" ({each.scale:.4g} times)" if each.is_scaled else ""
    return f"{what}: {sides[0]} and {sides[1]} differ by {each.size:.2g} of the largest element{factor}"


def line_at(site: Mapping[str, Any]) -> CodeLine | None:
    """Return the line that a rank has recorded; None if it has not."""
    if not site:
        return None
    return CodeLine(label_cell(site["file"]), site["line"], site.get("function", ""), site.get("text", ""))


def find_length_fault(runs: Runs) -> Finding | None:
    """Return a finding if the runs, or the ranks of one, made different numbers of updates."""
    counts = [len(record.updates) for record in runs.parallel.ranks]
    expected = len(runs.single.ranks[0].updates)
    if set(counts) == {expected}:
        return None
    by_rank = ", ".join(map(str, counts))
    if len(set(counts)) > 1:
        return make_finding(
            "DDP326",
            summary="the ranks made different numbers of updates",
            ranks=[rank for rank, count in enumerate(counts) if count < max(counts)],
            evidence=(f"{by_rank} updates on ranks 0 to {len(counts) - 1}",),
        )
    return make_finding(
        "DDP822",
        summary=f"one rank makes {expected} updates, and {len(counts)} ranks make {counts[0]}, of the same samples",
        evidence=(f"{by_rank} updates on ranks 0 to {len(counts) - 1}",),
    )
