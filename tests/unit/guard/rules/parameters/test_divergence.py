# SPDX-License-Identifier: Apache-2.0
"""Findings about diverging ranks, from entries as the ranks of a job write them."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from ddpilot.findings.finding import Finding
from ddpilot.guard.notes import LOCAL_STEPS
from ddpilot.guard.rules.parameters.divergence import Divergence
from ddpilot.guard.rules.parameters.first_difference import NUM_FREE_STEPS, NUM_STEPS_BEFORE_GROUP
from ddpilot.guard.rules.parameters.reduction_order import ReductionOrder
from ddpilot.guard.rules.parameters.steps import MatchedStep
from ddpilot.guard.rules.registry import RuleRunner
from ddpilot.record.flight_ring.log import Collective, RankLog, Tensor
from ddpilot.record.journal import Entry
from tests.unit.guard.rules.feeding import judge

MS = 1_000_000
NO_GROUP = ("free", "no group/1/123", "train.py:7", 0)
TWO_CLASSES = ({"optimizer": "SGD", "momentum": "0"}, {"optimizer": "Adam", "betas": "(0.9, 0.999)"})
SITE = {"file": "train.py", "line": 7, "function": "", "text": "optimizer.step()"}


def pack(values: Sequence[float]) -> str:
    """Pack numbers as a fingerprint does."""
    return base64.b64encode(array("f", values).tobytes()).decode()


class Job:
    """Ranks that train, and the rules that read their entries."""

    def __init__(
        self,
        world_size: int,
        *,
        reduced: int | None = None,
        key: Sequence[Any] = ("ddp", "world", 0, 0),
        exchanged: int = 0,
        source: str = "",
    ) -> None:
        self.world_size = world_size
        self.reduced = reduced
        self.exchanged = exchanged
        self.book = RuleRunner(world_size, log=self._log, rules=[Divergence], sources=lambda: {"train.py": source})
        self.index = 0
        self.now_ns = 0
        self.key = list(key)
        self.said: list[Finding] = []

    def _log(self, rank: int) -> RankLog:
        sizes = [1] if self.reduced is None else [self.reduced, 1]
        sizes += [32] * self.exchanged
        tensors = [Tensor(dtype="float32", shape=(size,), device="cpu") for size in sizes]
        collectives = [
            Collective(
                index=at + 1,
                op="all_reduce",
                operator="allreduce_",
                group=None,
                seq=at,
                inputs=(tensor,),
                start_ns=10**15,
            )
            for at, tensor in enumerate(tensors)
        ]
        return RankLog(
            rank=rank,
            pid=1,
            host="",
            torch="",
            started_ns=0,
            started_unix_ns=0,
            heartbeat_ns=None,
            closed_ns=None,
            num_begun=2 if self.exchanged or self.key[1] != NO_GROUP[1] else 0,
            num_torn=0,
            num_faults=0,
            first_fault="",
            collectives=tuple(collectives),
        )

    def note(self, rank: int, kind: str, **values: Any) -> None:
        """One entry of `rank`."""
        self.index += 1
        self.said += self.book.feed({rank: [Entry(self.index, self.now_ns, kind, values)]}, self.now_ns)

    def parameters(self, rank: int, names: Sequence[str] = ("a", "b"), **values: Any) -> None:
        """Its parameters."""
        values = {"late": [], "moved": [], "largest": 64, "site": SITE, "made": SITE | {"line": 3}} | values
        values = {"sizes": [64] * len(names), "called": list(names), "dropped": {}, "is_seeded": True} | values
        values = {"settings": {}} | values
        self.note(rank, "parameter_set", key=list(self.key), names=list(names), **{"parameter_set": 1, **values})

    def step(
        self,
        rank: int,
        number: int,
        *,
        p: float = 1.0,
        g: float = 0.5,
        seq: int | None = None,
        events: str = "FB",
        **more: Any,
    ) -> None:
        """A step with a check; `p` and `g`: the norms of all parameters and gradients."""
        fingerprint = {"p": pack([p, p]), "w": pack([p, p]), "g": pack([g, g])}
        values = {"parameter_set": 1, "fingerprint": fingerprint, **more}
        self.note(rank, "step", step=number, seq=number if seq is None else seq, events=events, **values)

    def wait(self, ms: int = 400) -> None:
        """Nothing happens for a while, and then the rules are asked."""
        self.said += self.book.feed({}, self.now_ns)
        self.now_ns += ms * MS
        self.said += self.book.feed({}, self.now_ns)

    def finish(self) -> list[str]:
        """The job ends; codes of all that was said."""
        self.said += self.book.finish(self.now_ns)
        assert not self.book.faults
        return [finding.code for finding in self.said]


def run(job: Job, steps: int, names: Any = ("a", "b"), **more: Any) -> Job:
    """Every rank takes `steps` steps, all with `more`; the last rank's gradients differ, and then its parameters."""
    for rank in range(job.world_size):
        job.parameters(rank, names)
    for number in range(1, steps + 1):
        for rank in range(job.world_size):
            is_odd = rank == job.world_size - 1
            p = 1.0 + 0.1 * number * is_odd * (number > 1)
            job.step(rank, number, p=p, g=0.5 + 0.2 * is_odd, **more)
    return job


def test_divergence_says_nothing_of_ranks_that_agree() -> None:
    """For any values, NaN included."""
    job = Job(2)
    for rank in range(2):
        job.parameters(rank)
    for number in range(1, 40):
        for rank in range(2):
            job.step(rank, number, p=float("nan") if number > 20 else number, g=number)
    job.wait()
    assert job.finish() == []


def test_divergence_names_the_rank_that_is_unlike_the_others() -> None:
    """Of four, at both steps: gradients first, then parameters."""
    job = run(Job(4), 2)
    (finding,) = job.said
    assert finding.code == "DDP320"
    assert finding.ranks == (3,)
    assert finding.summary == "gradients differ between ranks at step 1, parameters at step 2"
    assert "step 1: gradient of a: norm rank 0 0.5, rank 1 0.5, rank 2 0.5, rank 3 0.7" in finding.evidence
    assert finding.source == "ddpilot explain DDP320"


@pytest.mark.parametrize(("events", "is_told"), [("F", True), ("FB", False)])
def test_divergence_says_that_no_backward_ran(events: str, is_told: bool) -> None:
    """As if gradients come from `torch.autograd.grad`; not if a backward ran."""
    (finding,) = run(Job(2), 3, events=events).said
    assert finding.code == "DDP320"
    assert ("torch.autograd.grad" in finding.why) is is_told


@pytest.mark.parametrize(
    ("why", "code"),
    [("bypass", "DDP321"), ("two forwards", "DDP322"), ("no_sync", "DDP323"), ("twice", "DDP329")],
)
def test_divergence_takes_the_cause_from_the_first_step_that_differs(why: str, code: str) -> None:
    """Not from the later step that proves it."""
    job = Job(2)
    for rank in range(2):
        job.parameters(rank)
        job.step(rank, 1, g=1.0 + rank, events="FBB", why_local=why, local_site=SITE | {"line": 5})
    assert job.said == []
    for rank in range(2):
        job.step(rank, 2, p=1.0 + rank)
    (finding,) = job.said
    assert finding.code == code
    assert finding.place is not None
    assert finding.place.line == (7 if why == "no_sync" else 5)


def test_divergence_waits_for_steps_that_may_be_local_on_purpose() -> None:
    """Without any reduction by DDP it takes 16 steps, and there is no finding if other code averages."""
    local = {"events": "B", "why_local": "bypass", "local_site": SITE}
    assert run(Job(2), LOCAL_STEPS - 1, **local).said == []
    assert [finding.code for finding in run(Job(2), LOCAL_STEPS + 1, **local).said] == ["DDP321"]
    assert run(Job(2), LOCAL_STEPS - 1, **local).finish() == ["DDP321"]
    assert run(Job(2, reduced=64), 40, **local).finish() == []
    assert run(Job(2, reduced=63), 40, **local).finish() == ["DDP321"]


def test_divergence_warns_of_rounds_in_no_sync_and_is_sure_at_the_end() -> None:
    """Local SGD is written this way, with long periods; a job that ends without an average was not local SGD."""
    local = {"events": "fb", "why_local": "no_sync", "local_site": SITE}
    assert run(Job(2), NUM_FREE_STEPS - 1, **local).said == []
    (finding,) = run(Job(2), NUM_FREE_STEPS + 1, **local).said
    assert (finding.code, finding.severity) == ("DDP323", "warning")
    short = run(Job(2), LOCAL_STEPS, **local)
    assert short.finish() == ["DDP323"]
    assert short.said[0].severity == "error"


def test_divergence_says_nothing_of_ranks_that_the_program_makes_equal_again() -> None:
    """It has averaged once and will do so again: the second period may have any length."""
    job = Job(2)
    for rank in range(2):
        job.parameters(rank)
    for number in range(1, 100):
        for rank in range(2):
            apart = rank * number * (number > 1 and number != 10)
            job.step(rank, number, p=1.0 + apart, g=0.5 + 0.2 * rank, events="fb", why_local="no_sync", local_site=SITE)
    assert job.finish() == []


def test_divergence_forgets_gradients_that_did_no_harm() -> None:
    """If parameters agree afterwards, the ranks were made equal again."""
    job = Job(2)
    for rank in range(2):
        job.parameters(rank)
    for number in range(1, 9):
        for rank in range(2):
            job.step(rank, number, g=1.0 + rank * (number < 8))
    assert job.finish() == []


@pytest.mark.parametrize("silent", ["join", "hook mine"])
def test_divergence_says_nothing_where_ranks_may_differ(silent: str) -> None:
    """Under Join, and with an unknown hook."""
    assert run(Job(2), 5, why_silent=silent).finish() == []


def test_divergence_compares_only_the_same_moment() -> None:
    """Steps between different collectives are different steps, whatever their number."""
    job = Job(2)
    for rank in range(2):
        job.parameters(rank)
        for number in range(1, 9):
            job.step(rank, number, p=number + rank, seq=2 * number + rank)
    job.wait()
    assert job.finish() == []


def test_divergence_compares_what_ranks_have_in_common() -> None:
    """Optimizers that divide the parameters among ranks have nothing in common."""
    job = Job(2)
    job.parameters(0, names=["a", "b"])
    job.parameters(1, names=["c", "d"])
    for number in range(1, 9):
        for rank in range(2):
            job.step(rank, number, p=number + rank, g=rank)
    assert job.finish() == []


def test_divergence_compares_by_the_names_that_a_step_was_taken_with() -> None:
    """Rank 0 is a step ahead and has frozen the first parameter; then rank 1's note on the previous step arrives."""
    job = Job(2)
    before, after = ({key: pack(values) for key in "pwg"} for values in ([1.0, 2.0], [2.0]))
    for rank in range(2):
        job.parameters(rank, names=["a", "b"])
        job.step(rank, 1, fingerprint=before)
        job.parameters(rank, names=["b"])
        job.step(rank, 2, fingerprint=after)
    job.wait()
    assert job.finish() == []


def test_divergence_does_not_wait_for_a_rank_for_ever() -> None:
    """Two of three ranks that differ are enough, after a while."""
    job = Job(3)
    for rank in range(2):
        job.parameters(rank)
        job.step(rank, 1, p=1.0 + rank)
    assert job.said == []
    job.wait()
    assert [finding.code for finding in job.said] == ["DDP325"]


def test_divergence_names_the_rank_that_skipped_a_step_also_at_the_end() -> None:
    """No reduction proves it earlier: the only finding at the end is about rank 1."""
    job = Job(2)
    for rank in range(2):
        job.parameters(rank)
        job.step(rank, 1, events="", seq=1)
    job.step(0, 2, events="", seq=2)
    job.step(0, 3, events="", seq=3, p=2.0)
    job.step(1, 2, events="", seq=3)
    assert job.said == []
    assert job.finish() == ["DDP326"]
    (finding,) = job.said
    assert finding.ranks == (1,)
    assert finding.summary == "step 2: rank 0 called optimizer.step(), rank 1 did not"


def test_divergence_names_the_step_that_was_skipped_where_it_is_seen_at_a_later_check() -> None:
    """Steps between two checks have no fingerprints; one of them is missing."""
    job = Job(3)
    for rank in range(3):
        job.parameters(rank)
        job.step(rank, 1)
    for number in range(2, 9):
        for rank in range(3):
            if (rank, number) != (1, 4):
                values = {"step": number - (rank == 1 and number > 4), "seq": number, "events": "FB"}
                job.note(rank, "step", parameter_set=1, **values)
    for rank in range(3):
        job.step(rank, 9 - (rank == 1), seq=9, p=2.0 + (rank == 1))
    (finding,) = job.said
    assert finding.code == "DDP326"
    assert finding.ranks == (1,)
    assert finding.summary == "step 4: ranks 0,2 called optimizer.step(), rank 1 did not"


def test_divergence_names_ranks_that_take_no_steps() -> None:
    """Rank 1 takes part in reductions, and its optimizer never steps."""
    job = Job(2)
    job.parameters(0)
    for number in range(1, 7):
        job.step(0, number, p=number)
        job.wait()
    (finding,) = job.said
    assert finding.code == "DDP326"
    assert finding.ranks == (1,)
    server = Job(2, reduced=64)
    server.parameters(0)
    for number in range(1, 7):
        server.step(0, number, p=number)
        server.wait()
    assert server.finish() == []


def test_divergence_of_a_model_that_was_never_wrapped_needs_one_start_and_no_other_reduction() -> None:
    """Models that begin different, or are averaged otherwise, may be intended; a few steps prove nothing."""
    free = ("free", 123, "train.py:7", 0)
    assert run(Job(2, key=free), 5).said == []
    assert run(Job(2, key=free), 5).finish() == ["DDP324"]
    (finding,) = run(Job(2, key=free), NUM_FREE_STEPS + 1).said
    assert finding.severity == "warning"
    assert "set a different seed on each" in finding.fix
    assert run(Job(2, key=free, reduced=64), NUM_FREE_STEPS + 40).finish() == []
    apart = Job(2, key=free)
    for rank in range(2):
        apart.parameters(rank)
    for number in range(1, 100):
        for rank in range(2):
            apart.step(rank, number, p=number + rank, g=rank)
    assert apart.finish() == []


@pytest.mark.parametrize(
    ("source", "is_early"),
    [
        ("model = Net()\nfor x in loader:\n    model(x).backward()\n    optimizer.step()\n", True),
        ("if step % 32 == 0:\n    average(model)\n", False),
        ("for member in ensemble:\n    optimizer.step()\n", False),
        ("", False),
    ],
)
def test_divergence_of_a_model_that_was_never_wrapped_comes_early_where_ranks_exchange_nothing(
    source: str, is_early: bool
) -> None:
    """Nothing in the source suggests that the program averages later, or trains ranks separately on purpose."""
    free = ("free", 123, "train.py:7", 0)
    assert run(Job(2, key=free, source=source), LOCAL_STEPS - 1).said == []
    early = run(Job(2, key=free, source=source), LOCAL_STEPS + 1)
    assert [finding.code for finding in early.said] == ["DDP324"] * is_early


def train_apart(*, is_seeded: bool, rate_of_rank: float = 0.0, decay_of_rank: float = 0.0, source: str = "") -> Job:
    """Two ranks without a process group train models that begin different."""
    job = Job(2, key=NO_GROUP, source=source)
    for rank in range(2):
        job.parameters(rank, is_seeded=is_seeded, settings={"weight_decay": str(decay_of_rank * rank)})
    for number in range(1, LOCAL_STEPS + 1):
        for rank in range(2):
            job.step(rank, number, p=number + rank, g=1 + rank, seq=-1, rates=[0.1 + rate_of_rank * rank])
    return job


def test_divergence_without_a_process_group_is_found_where_models_begin_equal_or_without_a_seed() -> None:
    """Models that the program seeds by rank, or gives other learning rates, are a search or an ensemble."""
    (finding,) = run(Job(2, key=NO_GROUP), LOCAL_STEPS + 1, seq=-1).said
    assert (finding.code, finding.ranks) == ("DDP324", (0, 1))
    assert finding.summary == "ranks 0,1 train separate models, without a process group"
    assert finding.why.startswith("no rank has a process group")
    assert "init_group()" in finding.fix
    assert train_apart(is_seeded=False).finish() == ["DDP324"]
    assert train_apart(is_seeded=True).finish() == []
    assert train_apart(is_seeded=False, rate_of_rank=0.1).finish() == []
    assert train_apart(is_seeded=False, decay_of_rank=0.1).finish() == []


@pytest.mark.parametrize(
    ("source", "codes"),
    [
        ("fold = int(os.environ['RANK'])", []),
        ("for lr in search_space[int(os.environ['RANK']) :: 2]:", []),
        ("folder = paths[int(os.environ['RANK'])]", ["DDP324"]),
        ("fold = 3", ["DDP324"]),
    ],
)
def test_divergence_without_a_process_group_is_meant_if_the_source_says_what_each_rank_trains(
    source: str, codes: list[str]
) -> None:
    """Its ranks choose a fold or a trial by their number."""
    assert train_apart(is_seeded=False, source=source).finish() == codes


def repeat_without_group(source: str = "", exchanged: int = 0, num_steps: int = LOCAL_STEPS) -> Job:
    """Two ranks without a process group repeat the same training."""
    job = Job(2, key=NO_GROUP, source=source, exchanged=exchanged)
    for rank in range(2):
        job.parameters(rank)
    for number in range(1, num_steps + 1):
        for rank in range(2):
            job.step(rank, number, p=number, g=number, seq=-1)
    return job


def test_divergence_without_a_process_group_waits_longer_if_the_source_has_one() -> None:
    """The program may create it later. At the end, the ranks had none."""
    job = repeat_without_group("if args.distributed: dist.init_process_group()", num_steps=100)
    assert job.said == []
    assert job.finish() == ["DDP324"]
    assert len(repeat_without_group("dist.init_process_group()", num_steps=NUM_STEPS_BEFORE_GROUP).said) == 1


def test_divergence_before_or_after_a_process_group_is_not_reported() -> None:
    """All ranks calibrate on the same samples before they train in DDP, or after it."""
    source = "dist.init_process_group()"
    before = repeat_without_group(source)
    before.key = ["ddp", "world", 0, 0]
    for rank in range(2):
        before.parameters(rank, parameter_set=2)
    assert before.finish() == []
    assert repeat_without_group(source, exchanged=1).finish() == []


@pytest.mark.parametrize(
    ("key", "steps", "early", "late"),
    [
        (NO_GROUP, LOCAL_STEPS, ["DDP324"], ["DDP324"]),
        (NO_GROUP, 5, [], ["DDP324"]),
        (NO_GROUP, 4, [], []),
        (("free", "29500/1/123", "train.py:7", 0), NUM_FREE_STEPS, [], []),
    ],
)
def test_divergence_without_a_process_group_finds_ranks_that_repeat_the_same_training(
    key: Sequence[Any], steps: int, early: list[str], late: list[str]
) -> None:
    """In a group, they may be averaged, or are compared by their data. A few steps are a trial."""
    job = Job(2, key=key)
    for rank in range(2):
        job.parameters(rank)
    for number in range(1, steps + 1):
        for rank in range(2):
            job.step(rank, number, p=number, g=number, seq=-1)
    assert [finding.code for finding in job.said] == early
    assert job.finish() == late
    for finding in job.said:
        assert finding.summary.startswith("ranks 0,1 repeat the same training")
        assert "repeats the same training" in finding.why


def test_divergence_takes_no_copy_for_a_model_that_was_never_wrapped() -> None:
    """Its optimizer is created repeatedly, as in meta-learning, or a DDP model has the same shapes."""
    job = Job(2)
    for ordinal in range(4):
        job.key = ["free", 123, "train.py:7", ordinal]
        for rank in range(2):
            job.parameters(rank, parameter_set=ordinal)
            for number in range(1, 7):
                job.step(rank, number, p=number + rank * (number > 1), g=rank, u=ordinal)
    assert job.finish() == []
    twin = Job(2, key=["free", 123, "train.py:7", 0])
    shapes = [[4, 2], [4]]
    for rank in range(2):
        described = [[name, shape, "float32"] for name, shape in zip("ab", shapes, strict=True)]
        twin.note(rank, "ddp", group="world", ordinal="0", names=described, site=SITE)
    names = [f"parameter {place} {shape}" for place, shape in enumerate(shapes, 1)]
    assert run(twin, NUM_FREE_STEPS + 9, names=names).finish() == []


def test_divergence_names_the_line_of_a_wrapper_that_was_thrown_away() -> None:
    """A DDP model had the same shapes, but this is not a copy of it: it is the model that was wrapped."""
    shapes = [[4, 2], [4]]
    described = [[name, shape, "float32"] for name, shape in zip("ab", shapes, strict=True)]
    names = [f"parameter {place} {shape}" for place, shape in enumerate(shapes, 1)]
    for reduced, codes in ((None, ["DDP324"]), (64, [])):
        job = Job(2, key=["free", 123, "train.py:7", 0], reduced=reduced)
        for rank in range(2):
            job.note(rank, "ddp", group="world", ordinal="0", names=described, site=SITE | {"line": 3})
            job.parameters(rank, names, dropped=SITE | {"line": 3})
        for number in range(1, NUM_FREE_STEPS + 2):
            for rank in range(2):
                job.step(rank, number, p=1.0 + rank * (number > 1), g=0.5 + rank)
        assert job.finish() == codes
        for finding in job.said:
            assert finding.place is not None
            assert finding.place.line == 3
            assert finding.fix.startswith("Keep the DDP model")


def test_divergence_takes_no_parts_of_one_model_for_models_that_were_never_wrapped() -> None:
    """They exchange results in every second step, larger than a metric."""
    free = ("free", 123, "train.py:7", 0)
    assert run(Job(2, key=free, exchanged=NUM_FREE_STEPS // 2), NUM_FREE_STEPS + 1).finish() == []
    assert run(Job(2, key=free, exchanged=NUM_FREE_STEPS // 4), NUM_FREE_STEPS + 1).finish() == ["DDP324"]


def test_divergence_takes_a_search_over_learning_rates_for_what_it_is() -> None:
    """The ranks differ from the first step on."""
    job = Job(2, key=("free", 123, "train.py:7", 0))
    for rank in range(2):
        job.parameters(rank)
    for number in range(1, NUM_FREE_STEPS + 9):
        for rank in range(2):
            job.step(rank, number, p=number + rank * (number > 1), g=rank, rates=[0.1 + rank])
    assert job.finish() == []


def fold(
    job: Job, parts: Sequence[int], sizes: Sequence[int], *, whole: int = 60, number: int = 1, **sampler: Any
) -> None:
    """Each rank begins to train on a part of a dataset."""
    for rank, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        key = {"loader": 1, "pass": number}
        job.note(rank, "loader_pass", **key, part=part, share=[size, whole], sampler=sampler)
        job.note(rank, "batch", **key, batch=1, checksum=rank)


@pytest.mark.parametrize(
    ("parts", "sizes", "codes"),
    [((1, 2), (40, 40), []), ((1, 2), (33, 33), []), ((1, 2), (30, 32), ["DDP324"]), ((1, 1), (40, 40), ["DDP324"])],
)
def test_divergence_takes_cross_validation_for_what_it_is(
    parts: Sequence[int], sizes: Sequence[int], codes: list[str]
) -> None:
    """Different parts with more samples in total than the dataset; not shards, nor the same part on all ranks."""
    job = Job(2, key=("free", "shapes", "train.py:7", 0))
    fold(job, parts, sizes)
    assert run(job, NUM_FREE_STEPS + 1).finish() == codes


def test_divergence_goes_by_the_pass_that_is_read() -> None:
    """Earlier folds do not count, nor do parts that a sampler divides."""
    free = ("free", "shapes", "train.py:7", 0)
    job = Job(2, key=free)
    fold(job, (1, 2), (40, 40))
    fold(job, (3, 3), (60, 60), number=2)
    assert run(job, 5).finish() == ["DDP324"]
    divided = Job(2, key=free)
    fold(divided, (1, 2), (40, 40), replicas=2)
    assert run(divided, 5).finish() == ["DDP324"]


def test_divergence_says_which_settings_of_the_optimizer_differ() -> None:
    """Each rank makes an update of its own from the same gradients."""
    job = Job(2)
    for rank in range(2):
        job.parameters(rank, settings={"optimizer": "SGD", "momentum": "0.9", "weight_decay": f"0.{rank}"})
    for number in range(1, 4):
        for rank in range(2):
            job.step(rank, number, p=1 + number * rank * (number > 1), rates=[0.1])
    (finding,) = job.said
    assert (finding.code, "settings of the optimizer" in finding.why) == ("DDP325", True)
    assert [line for line in finding.evidence if line.startswith("rank ")] == [
        "rank 0: weight_decay 0.0",
        "rank 1: weight_decay 0.1",
    ]


def test_divergence_names_only_the_class_of_optimizers_that_differ_in_it() -> None:
    """Each has settings that the other does not know."""
    step = MatchedStep(sets={rank: {"settings": settings} for rank, settings in enumerate(TWO_CLASSES)})  # type: ignore[typeddict-item]
    assert step.settings == {0: {"optimizer": "SGD"}, 1: {"optimizer": "Adam"}}


def test_divergence_says_which_learning_rates_differ() -> None:
    """At the line of the step, since the model was wrapped correctly."""
    job = Job(2)
    for rank in range(2):
        job.parameters(rank)
    for number in range(1, 5):
        for rank in range(2):
            job.step(rank, number, p=1 + number * rank * (number > 2), rates=[0.1 / (1 + rank * (number > 2)), 0.5])
    (finding,) = job.said
    assert finding.code == "DDP325"
    assert finding.place is not None
    assert finding.place.line == 7
    assert {"rank 0: lr 0.1, 0.5", "rank 1: lr 0.05, 0.5"} <= set(finding.evidence)


def test_divergence_says_since_when_parameters_differ_that_were_the_same() -> None:
    """They were wrapped correctly: the line is that of the step."""
    job = Job(2)
    for rank in range(2):
        job.parameters(rank)
    for number in range(1, 5):
        for rank in range(2):
            job.step(rank, number, p=1 + number * rank * (number > 2), rates=[0.1])
    (finding,) = job.said
    assert finding.code == "DDP325"
    assert finding.place is not None
    assert finding.place.line == 7
    assert "parameters were the same on all ranks before step 2" in finding.evidence


@pytest.mark.parametrize("begun_after", [(2, 2), (3, 2), (1, 0)], ids=["together", "apart", "apart before"])
def test_divergence_says_that_epochs_began_at_different_steps(begun_after: tuple[int, int]) -> None:
    """As with fewer batches on one rank, which starts over: the schedule then steps at different steps on each rank."""
    job = Job(2)
    for rank in range(2):
        job.parameters(rank)
    for number in range(5):
        for rank in range(2):
            if number:
                job.step(rank, number, p=1 + number * rank * (number > 3), rates=[0.1])
            if number == begun_after[rank]:
                facts = {"length": None, "samples": None, "sampler": None, "site": SITE}
                job.note(rank, "loader_pass", **{"loader": 7, "pass": 2, **facts})
    (finding,) = job.said
    assert finding.code == "DDP325"
    is_told = begun_after == (3, 2)
    assert ("an epoch began after 3 steps on rank 0, 2 steps on rank 1" in finding.evidence) == is_told
    assert ("at different steps" in (finding.why or "")) == is_told


def test_divergence_takes_what_all_ranks_loaded_for_no_cause() -> None:
    """Also if one rank's notes come later, and the optimizer was created after loading."""
    job = Job(2)
    for rank in range(2):
        job.note(rank, "load", group="world", ordinal=0, site=SITE | {"line": 20 + rank})
        job.parameters(rank)
        for number in range(1, 5):
            job.step(rank, number, p=1 + number * rank * (number > 2))
    (finding,) = job.said
    assert finding.ranks == (0, 1)
    assert finding.place is not None
    assert finding.place.line == 7


def test_divergence_keeps_little_however_long_it_runs() -> None:
    """Steps without a counterpart are dropped."""
    job = Job(2)
    job.parameters(0)
    for number in range(1000):
        job.step(0, number, events="fb")
    rule = job.book._rules[0]
    assert isinstance(rule, Divergence)
    (comparison,) = rule._comparisons.values()
    assert len(comparison.steps._steps) <= 128
    assert len(comparison.steps._waiting) <= 128


def test_divergence_says_another_order_at_construction_and_nothing_else() -> None:
    """With names and shapes of the first that differ; different names alone are not a finding."""
    job = Job(2)
    names = [["left.weight", [4, 4], "float32"], ["right.weight", [4, 4], "float32"]]
    for rank in range(2):
        job.note(rank, "ddp", group="world", ordinal=0, names=names[:: 1 - 2 * rank], site=SITE)
        job.note(
            rank, "ddp", group="world", ordinal=1, names=[[f"{name}{rank}", *rest] for name, *rest in names], site=SITE
        )
    run(job, 3)
    (finding,) = job.said
    assert finding.code == "DDP327"
    assert finding.evidence == ("parameter 0: rank 0 left.weight [4, 4]", "parameter 0: rank 1 right.weight [4, 4]")


def last(job: Job, *norms: float, number: int = 6) -> list[str]:
    """After five checked steps without differences, one that is not checked, and the ranks' last samples."""
    for rank in range(len(norms)):
        job.parameters(rank)
    for step in range(1, 6):
        for rank in range(len(norms)):
            job.step(rank, step)
    for rank in range(len(norms)):
        job.note(rank, "step", parameter_set=1, step=6, seq=6, events="FB")
    for rank, norm in enumerate(norms):
        values = {"p": pack([norm]), "w": pack([norm]), "g": pack([-1.0])}
        job.note(rank, "last_step", parameter_set=1, step=number + rank * (number > 6), places=[1], fingerprint=values)
    return job.finish()


def test_divergence_names_the_rank_that_differs_before_the_last_step() -> None:
    """By the elements in its sample."""
    job = Job(3)
    assert last(job, 1.0, 2.0, 1.0) == ["DDP325"]
    (finding,) = job.said
    assert finding.ranks == (1,)
    assert finding.summary == "parameters differ between ranks before step 6, the last"
    assert "step 6: parameter b: norm of some elements rank 0 1, rank 1 2, rank 2 1" in finding.evidence
    assert "parameters were the same on all ranks before step 5" in finding.evidence


def test_divergence_says_nothing_of_last_steps_that_are_alike_or_not_the_same() -> None:
    """Ranks that end at different steps have nothing in common there."""
    assert last(Job(3), 1.0, 1.0, 1.0) == []
    assert last(Job(3), 1.0, 2.0, 1.0, number=7) == []


def test_divergence_goes_by_last_steps_that_ddp_reduced_of_models_that_were_alike() -> None:
    """Local steps may be averaged after the last of them."""
    for e, p in (("B", 1.0), ("FB", 2.0)):
        job = Job(2, reduced=64)
        for rank in range(2):
            job.parameters(rank)
            job.step(rank, 1, p=1.0 + (p - 1.0) * rank, events="B", why_local="bypass", local_site=SITE)
        for rank in range(2):
            job.note(rank, "step", parameter_set=1, step=2, seq=2, events=e)
        for rank in range(2):
            values = {"p": pack([1.0 + rank]), "w": pack([1.0]), "g": pack([-1.0])}
            job.note(rank, "last_step", parameter_set=1, step=2, places=[0], fingerprint=values)
        assert job.finish() == []


class FromDevices(Job):
    """As `Job`; the fingerprints come from devices, after their steps have been noted."""

    def step(self, rank: int, number: int, **values: Any) -> None:
        """A step whose fingerprint is on its way."""
        self._to_come = (*getattr(self, "_to_come", ()), (rank, number, values))
        sizes = {name: values[name] for name in values if name in ("seq", "events")}
        self.note(
            rank,
            "step",
            **{"parameter_set": 1, "step": number, "seq": number, "events": "FB", "is_copying": True, **sizes},
        )

    def arrive(self, *ranks: int) -> None:
        """All fingerprints of `ranks` that are on their way."""
        for rank, number, values in self._to_come:
            if rank in ranks:
                p, g = (pack([values.get(name, default)] * 2) for name, default in (("p", 1.0), ("g", 0.5)))
                self.note(rank, "fingerprint", parameter_set=1, step=number, fingerprint={"p": p, "w": p, "g": g})
        self._to_come = tuple(each for each in self._to_come if each[0] not in ranks)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_fingerprints_that_come_later_are_compared_at_their_steps(order: tuple[int, int]) -> None:
    """The second step is named, although both ranks have taken a third one by then."""
    job = FromDevices(2)
    for rank in (0, 1):
        job.parameters(rank)
        for number, p in ((1, 1.0), (2, 1.0 + 0.1 * rank), (3, 1.0 + 0.1 * rank)):
            job.step(rank, number, p=p)
    job.wait()
    assert not job.said
    for rank in order:
        job.arrive(rank)
    assert job.finish() == ["DDP325"]
    assert "step 2" in " ".join((job.said[0].summary, *job.said[0].evidence))


def test_a_fingerprint_that_never_comes_is_not_waited_for_by_the_others() -> None:
    """One device hangs: the other two ranks are compared after a while, without a finding if they are equal."""
    for others, found in ((1.0, []), (1.1, ["DDP325"])):
        job = FromDevices(3)
        for rank in (0, 1, 2):
            job.parameters(rank)
            for number in (1, 2):
                job.step(rank, number, p=1.0 if rank == 0 or number == 1 else others)
        job.arrive(0)
        job.wait()
        assert not job.said
        job.arrive(1)
        job.wait()
        assert job.finish() == found


KEY = ["29500/1", "world", 1]
NAMES = {"a": 1.0, "b": -2.0, "c": 0.0, "d": 0.0}


def noted(order: str, values: dict[str, float] = NAMES, key: list[Any] = KEY) -> dict[str, Any]:
    """The note of a rank that reduced the gradients of the parameters `order`; a dot is a different tensor."""
    names = list(dict.fromkeys(order.replace(".", "")))
    sums = base64.b64encode(array("f", [values[name] for name in names]).tobytes()).decode()
    order_names = ["" if name == "." else name for name in order]
    return {"key": key, "names": names, "order": order_names, "sums": sums, "line": SITE, "site": SITE}


def test_reduced_order_names_the_gradients_that_were_added_to_each_other() -> None:
    """Each rank is compared with the first; reported once."""
    (finding,) = judge(ReductionOrder, [(0, "reduction_order", noted("abc")), (1, "reduction_order", noted("bac"))])
    assert (finding.code, finding.severity, finding.ranks) == ("DDP327", "error", (0, 1))
    assert finding.summary.endswith("than rank 0: the gradient of b is added to that of a")
    assert finding.evidence[:2] == (
        "all_reduce 1 before the first step: rank 0 a, rank 1 b",
        "all_reduce 2 before the first step: rank 0 b, rank 1 a",
    )
    assert finding.place is not None
    assert finding.place.line == SITE["line"]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (noted("abc"), noted("abc")),
        (noted("abcd"), noted("abdc")),  # the same values: which is which cannot be told
        (noted("ab"), noted("ba", {"a": -2.0, "b": 1.0})),  # the names are swapped, not the parameters
        (noted("ab."), noted("ba")),  # not the same calls
        (noted("a.b"), noted(".ab")),  # a gradient met something else: sizes, not names, say what that was
        (noted("ab"), noted("ac")),
        (noted("ab"), noted("ba", key=["29500/2", "world", 1])),  # of the next group
    ],
)
def test_reduced_order_says_nothing_where_it_is_not_certain(here: dict[str, Any], there: dict[str, Any]) -> None:
    """Whichever rank's note comes first."""
    for notes in ((here, there), (there, here)):
        assert judge(ReductionOrder, [(rank, "reduction_order", note) for rank, note in enumerate(notes)]) == []
