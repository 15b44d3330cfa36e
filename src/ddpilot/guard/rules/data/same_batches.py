# SPDX-License-Identifier: Apache-2.0
"""DDP401: several ranks train on the same batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.rules.gathering import Gathering, Members
from ddpilot.guard.rules.newest import Newest
from ddpilot.guard.rules.rule import PromptRule, RuleContext, place_of
from ddpilot.record.journal import Entry

MIN_DIFFERENT = 3
"""Minimum number of batches that are equal on the ranks and differ from each other; none may differ between ranks."""
MIN_MADE_BY_HAND = 6
"""The same in forwards if no loader gave equal batches, since synthetic inputs may be equal on purpose."""
MIN_ELEMENTS = 4
"""An input of fewer elements, such as a step number, is not a batch."""
_MAX_FORWARDS = 64
_MAX_MODELS = 256
_SAME = "The gradients of these ranks are the same, so that their mean is that of one rank: the others add nothing."
_NEARLY_SAME = "The gradients of these ranks differ by what they draw at random only: the others add next to nothing."


class SameBatch(PromptRule):
    """Compares fingerprints of the inputs of a DDP model in training, and of the batches of its loader.

    The model's inputs decide: a program may load the same data on every rank and select its part afterwards. A model
    that selects its part itself, as of a sequence, is recognized by outputs that differ although nothing random was
    drawn.
    """

    codes: tuple[str, ...] = ("DDP401",)
    kinds: tuple[str, ...] = ("ddp_model", "loader_pass", "batch", "input", "random")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._members = Members(context.world_size)
        self._inputs: Newest[int, Gathering[int, int]] = Newest(_MAX_MODELS)
        self._outputs: Gathering[tuple[int, int], tuple[Any, bool]] = Gathering(256)
        self._numbers: Newest[int, Newest[int, None]] = Newest(_MAX_MODELS)
        self._loaded: Gathering[tuple[int, int, int], int] = Gathering(1024)
        self._passes: Gathering[tuple[int, int], dict[str, Any]] = Gathering(64)
        self._judged: Newest[int, None] = Newest(_MAX_MODELS)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        values = entry.values
        if entry.kind == "ddp_model":
            self._members.note(values)
        elif entry.kind == "loader_pass":
            self._passes.put((values["loader"], values["pass"]), rank, dict(values))
        elif entry.kind == "batch":
            self._loaded.put((values["loader"], values["pass"], values["batch"]), rank, values["print"])
        elif entry.kind == "random":
            is_drawn = values["before"] != values["after"]
            self._outputs.put((values["model"], values["forward"]), rank, (values.get("output"), is_drawn))
        elif entry.kind == "input" and values["elements"] >= MIN_ELEMENTS:
            return self._compare(rank, values)
        return ()

    def _compare(self, rank: int, values: Any) -> Iterable[Finding]:
        model = values["model"]
        members = self._members.of(model)
        if model in self._judged or len(members) < 2 or rank not in members:
            return
        inputs = self._inputs.setdefault(model, Gathering(_MAX_FORWARDS))
        inputs.put(values["forward"], rank, values["print"])
        numbers = self._numbers.setdefault(model, Newest(_MAX_FORWARDS))
        numbers[values["forward"]] = None
        complete = [n for n in numbers if len(inputs.get(n)) == len(members)]
        whole = [inputs.get(n) for n in complete]
        if len(whole) < MIN_DIFFERENT:
            return
        alike: dict[tuple[int, ...], list[int]] = {}
        for member in members:
            alike.setdefault(tuple(found[member] for found in whole), []).append(member)
        for prints, ranks in alike.items():
            if len(ranks) < 2 or len(set(prints)) < MIN_DIFFERENT:
                continue
            outputs = self._compare_outputs(model, complete, ranks)
            if outputs == "parts":
                self._judged[model] = None
                continue
            num_loaded = self._count_loaded(ranks, values)
            if num_loaded >= MIN_DIFFERENT or len(whole) >= MIN_MADE_BY_HAND:
                yield self._finding(ranks, values, len(whole), num_loaded, is_sure=outputs == "same")
        if not any(len(ranks) > 1 for ranks in alike.values()):
            # The inputs have differed once: later ones may coincide.
            self._judged[model] = None

    def _compare_outputs(self, model: int, forwards: list[int], ranks: list[int]) -> str:
        """Compare the outputs of the model on `ranks`: "same" as far as known, "random", or "parts" of the work."""
        found = [self._outputs.get((model, forward)) for forward in forwards]
        known = [[one[rank] for rank in ranks] for one in found if all(rank in one for rank in ranks)]
        known = [one for one in known if all(output is not None for output, _ in one)]
        if all(len({output for output, _ in one}) == 1 for one in known):
            return "same"
        return "random" if any(is_drawn for one in known for _, is_drawn in one) else "parts"

    def _count_loaded(self, ranks: list[int], values: Any) -> int:
        """Count the different batches that the loader gave alike to `ranks`; 0 if one differed or there were none."""
        if "loader" not in values:
            return 0
        key = (values["loader"], values["pass"])
        given = [self._loaded.get((*key, number)) for number in range(1, 9)]
        whole = [[found[rank] for rank in ranks] for found in given if all(rank in found for rank in ranks)]
        return len({one[0] for one in whole}) if all(len(set(one)) == 1 for one in whole) else 0

    def _finding(self, ranks: list[int], values: Any, num_forwards: int, num_loaded: int, *, is_sure: bool) -> Finding:
        is_loaded = num_loaded >= MIN_DIFFERENT
        mine = self._passes.get((values["loader"], values["pass"])).get(ranks[0], {}) if is_loaded else {}
        evidence = [f"the inputs of {num_forwards} forwards were the same on {render_ranks(ranks)}"]
        if is_loaded:
            whose = "a stream" if mine.get("samples") is None else f"{mine['samples']} samples"
            evidence.append(f"so were {num_loaded} batches of the loader of {whose}")
            evidence.append(describe_sampler(mine))
        return make_finding(
            "DDP401",
            severity="error" if is_loaded and is_sure else "warning",
            summary=f"{render_ranks(ranks)} train on the same batches",
            ranks=tuple(ranks),
            line=place_of(mine.get("site")) or place_of(values.get("site")),
            evidence=tuple(evidence),
            why=(_SAME if is_sure else _NEARLY_SAME)
            + ("" if (mine.get("sampler") or {}).get("replicas") else " Nothing divides the samples among the ranks."),
            fix=_fix(mine),
        )


def _fix(loader: Mapping[str, Any]) -> str:
    """Return the fix. `loader`: the notes on the loader that gave the batches; empty if none did."""
    sampler = loader.get("sampler") or {}
    if loader and not sampler:
        return (
            "Let the dataset's __iter__ pass over the other ranks' samples: itertools.islice(samples, rank, None, "
            "world_size); with workers, for rank * num_workers + worker of world_size * num_workers."
        )
    if sampler.get("replicas"):
        return f"Give {sampler['kind']} the number of ranks, dist.get_world_size(), and each one's dist.get_rank()."
    return (
        "Give the loader sampler=DistributedSampler(dataset) and leave shuffle out, or let each rank draw its own "
        "samples (a seed that depends on the rank)."
    )


def describe_sampler(values: Any) -> str:
    """Describe the order of a pass over a loader; for a dataset without indexed samples, that it streams them."""
    sampler = values.get("sampler")
    if not sampler:
        return f"its dataset ({values.get('dataset', 'unknown')}) streams its samples"
    facts = [f"{name}={sampler[name]}" for name in ("replicas", "rank", "seed", "epoch") if name in sampler]
    return f"its sampler is {sampler['kind']}({', '.join(facts)})"
