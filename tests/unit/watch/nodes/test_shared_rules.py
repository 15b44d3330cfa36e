# SPDX-License-Identifier: Apache-2.0
"""Notes of guards on two nodes, whose clocks differ: compared on node 0, and what is found is known on both."""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Iterable, Mapping

import pytest

from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.parameters.divergence import Divergence
from ddpilot.guard.rules.registry import RuleRunner
from ddpilot.launching.observer import Chunk
from ddpilot.record.journal import Entry
from ddpilot.watch.nodes import shared_rules
from ddpilot.watch.nodes.digest import MAX_CHARS, encode
from ddpilot.watch.nodes.shared_rules import Bundle, NoteSender, SharedRules, decode_bundle, encode_bundle
from tests.unit.guard.rules.parameters.test_divergence import SITE, pack
from tests.unit.watch.logs import Writer, bucket, group_of
from tests.unit.watch.nodes.test_exchange import Hand

S = 1_000_000_000
MS = 1_000_000
STEP_NS = 20 * MS


class Node:
    """One of two nodes with its rank, whose clock is `ahead_ns` ahead of the moments that it is given."""

    def __init__(self, number: int, ahead_ns: int) -> None:
        self.number = number
        self.ahead_ns = ahead_ns
        self.hand = Hand(1 - number)
        self.comparing = SharedRules(self.hand, lambda: RuleRunner(2, rules=[Divergence], has_all_logs=False))
        self.num_given = 0
        self.index = 0

    def note(self, at_ns: int, kind: str, **values: object) -> Entry:
        """What its rank notes then."""
        self.index += 1
        return Entry(self.index, self.ahead_ns + at_ns, kind, values)

    def unit(self, at_ns: int) -> Entry:
        """Its rank has a model with two parameters and an optimizer."""
        key = ["ddp", "world", 0, 0]
        facts = {"names": ["a", "b"], "late": [], "moved": [], "largest": 6, "site": SITE, "made": SITE}
        return self.note(at_ns, "parameter_set", parameter_set=1, dropped={}, settings={}, key=key, **facts)

    def step(self, at_ns: int, number: int, value: float = 1.0) -> Entry:
        """Its rank takes a step after a backward that was reduced."""
        prints = {"p": pack([value, 1]), "w": pack([value, 1]), "g": pack([value, 1])}
        return self.note(
            at_ns, "step", parameter_set=1, step=number, seq=number, events="FB", fingerprint=prints, rates=[0.1]
        )

    def look(self, at_ns: int, entries: Iterable[Entry] = (), *, is_last: bool = False) -> list[Finding]:
        """What its observer finds then."""
        here = {self.number: list(entries)}
        return self.comparing.feed(here, self.ahead_ns + at_ns, is_last=is_last)

    def give(self, other: Node, at_ns: int) -> None:
        """What it has sent reaches the other one then."""
        new = self.hand.appended[self.num_given :]
        pieces = [Chunk(text, self.num_given + at, other.ahead_ns + at_ns) for at, text in enumerate(new, 1)]
        self.num_given += len(new)
        other.hand.pieces.setdefault(self.number, []).extend(pieces)


class Two:
    """Both nodes, which look four times a second; what one has sent comes to the other with its next look but one."""

    def __init__(self, ahead_ns: int) -> None:
        self.zero, self.one = Node(0, 7 * S), Node(1, 7 * S + ahead_ns)
        self.found: dict[int, list[tuple[int, Finding]]] = {0: [], 1: []}

    def run(self, steps: Mapping[int, Iterable[tuple[int, Entry]]], until_ns: int) -> None:
        """The ranks' entries by moment."""
        todo = {number: list(entries) for number, entries in steps.items()}
        for at_ns in range(0, until_ns, S // 4):
            for node in (self.zero, self.one):
                new = [entry for noted_ns, entry in todo[node.number] if noted_ns <= at_ns]
                todo[node.number] = todo[node.number][len(new) :]
                self.found[node.number] += [(at_ns, each) for each in node.look(at_ns, new)]
            if at_ns % (S // 2) == 0:
                self.one.give(self.zero, at_ns + S // 10)
                self.zero.give(self.one, at_ns + S // 10)


def train(node: Node, num: int, *, wrong_from: int = 10**9) -> list[tuple[int, Entry]]:
    """A rank that trains, with a step each 20 ms; other parameters from one of them on."""
    noted = [(0, node.unit(0))]
    for number in range(1, num + 1):
        at_ns = number * STEP_NS
        noted.append((at_ns, node.step(at_ns, number, 1.0 + node.number * (number >= wrong_from))))
    return noted


@pytest.mark.parametrize("ahead_ns", [0, -5 * S, 10**6 * S])
def test_parameters_that_differ_between_nodes_are_found_on_both(ahead_ns: int) -> None:
    """Whatever the clocks say, within two seconds of the step, and by node 0's account."""
    two = Two(ahead_ns)
    two.run({0: train(two.zero, 100), 1: train(two.one, 100, wrong_from=40)}, 4 * S)
    (here_ns, here), (there_ns, there) = two.found[0][0], two.found[1][0]
    assert (here.code, here.ranks) == (there.code, there.ranks)
    assert "at step 40" in here.summary
    assert here == there
    assert here_ns <= 40 * STEP_NS + 2 * S
    assert there_ns <= here_ns + S
    assert [len(found) for found in two.found.values()] == [1, 1]


@pytest.mark.parametrize("ahead_ns", [0, 10**6 * S])
def test_nodes_that_agree_have_nothing_to_say(ahead_ns: int) -> None:
    """Also to the end."""
    two = Two(ahead_ns)
    two.run({0: train(two.zero, 150), 1: train(two.one, 150)}, 4 * S)
    assert two.one.look(4 * S, is_last=True) == []
    two.one.give(two.zero, 4 * S)
    assert two.zero.look(4 * S, is_last=True) == []
    assert two.found == {0: [], 1: []}
    assert two.zero.comparing.faults == []


def test_a_node_whose_notes_come_late_is_not_taken_for_one_that_took_no_steps() -> None:
    """Node 0 waits: nothing is known of node 1 meanwhile."""
    two = Two(0)
    zero, one = train(two.zero, 150), train(two.one, 150)
    for at_ns in range(0, 3 * S, S // 4):
        new = [entry for noted_ns, entry in zero if at_ns - S // 4 < noted_ns <= at_ns]
        assert two.zero.look(at_ns, new) == []
    two.one.look(3 * S, [entry for _, entry in one])
    two.one.give(two.zero, 3 * S)
    assert two.zero.look(3 * S) == []


def test_nothing_is_sent_before_a_rank_has_noted_something() -> None:
    """As without guard; afterwards once a second."""
    one = Node(1, 0)
    for second in range(5):
        one.look(second * S)
    assert one.hand.appended == []
    one.look(5 * S, [one.unit(5 * S)])
    for quarter in range(20, 41):
        one.look(quarter * S // 4)
    assert len(one.hand.appended) == 6


def test_what_several_ranks_have_in_common_is_sent_once() -> None:
    """A fingerprint of eight ranks that agree takes hardly more than that of one."""
    numbers = random.Random(0)
    prints = {name: pack([numbers.random() for _ in range(1000)]) for name in "pwg"}
    sizes = {}
    for num_ranks in (1, 8):
        step = Entry(1, 5, "step", {"parameter_set": 1, "step": 1, "seq": 1, "fingerprint": prints, "rates": [0.1]})
        entries = tuple((rank, step) for rank in range(num_ranks))
        text = encode_bundle(Bundle(now_ns=7, entries=entries))
        assert decode_bundle(text) == Bundle(now_ns=7, entries=entries)
        sizes[num_ranks] = len(text)
    assert sizes[8] < 1.1 * sizes[1]


def test_a_large_bundle_goes_in_pieces_one_at_a_time() -> None:
    """None is longer than 64 KiB, and all of it comes."""
    numbers = random.Random(0)
    zero, one = Node(0, 0), Node(1, 0)
    texts = [bytes(numbers.randrange(48, 122) for _ in range(100)).decode() for _ in range(2000)]
    one.look(0, [one.note(0, "unknown", text=text) for text in texts])
    for half in range(1, 40):
        one.look(half * S // 2)
    assert len(one.hand.appended) > 3
    assert max(map(len, one.hand.appended)) <= MAX_CHARS
    one.give(zero, 20 * S)
    zero.look(20 * S)
    assert zero.comparing.faults == []


def test_a_lost_piece_ends_the_comparison_and_says_so() -> None:
    """Without it a rank would seem to have done nothing."""
    two = Two(0)
    two.run({0: train(two.zero, 40), 1: train(two.one, 40)}, S)
    two.one.num_given += 1
    two.run({0: [], 1: [(0, two.one.step(S, 41, 9.0))]}, 3 * S)
    (line,) = two.zero.comparing.faults
    assert line.startswith("guard no longer compares ranks of different nodes: node 1 (there): piece ")


def test_what_cannot_be_read_ends_the_comparison_and_says_so() -> None:
    """As of a node with another version."""
    zero = Node(0, 0)
    zero.hand.pieces = {1: [Chunk(".e30=", 1, 5)]}
    zero.look(S)
    (line,) = zero.comparing.faults
    assert "node 1 (there): not a bundle of a node: " in line


def test_a_finding_of_a_newer_version_ends_the_comparison_and_says_so() -> None:
    """It has a field that is not known here."""
    text = encode(now_ns=1, findings=(Finding(code="DDP325", name="x", severity="error", summary="x"),))
    newer = zlib.decompress(base64.b64decode(text)).replace(b'"name"', b'"field_of_later"')
    zero = Node(0, 0)
    zero.hand.pieces = {1: [Chunk(f".{base64.b64encode(zlib.compress(newer)).decode()}", 1, 5)]}
    zero.look(S)
    (line,) = zero.comparing.faults
    assert "field_of_later" in line


def test_more_than_can_be_sent_ends_the_comparison_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the node that has too much of it."""
    monkeypatch.setattr(shared_rules, "MAX_HELD", 10)
    one = Node(1, 0)
    one.look(0, [one.unit(0) for _ in range(11)])
    (line,) = one.comparing.faults
    assert "the ranks of this node record more notes than can be sent" in line
    assert one.hand.appended == []


def test_an_outbox_of_node_0_sends_findings_alone() -> None:
    """Nobody waits for its notes."""
    zero = Node(0, 0)
    outbox = NoteSender(zero.hand)
    outbox.put({}, [Finding(code="DDP325", name="x", severity="error", summary="x")])
    for second in range(5):
        outbox.send(second * S)
    assert len(zero.hand.appended) == 1


def test_a_late_look_at_two_ranks_of_one_node_does_not_hide_the_steps_of_the_second() -> None:
    """Their notes come rank by rank, and node 1 has not reported on the newest of the first rank yet."""
    zero, second, one = Node(0, 0), Node(0, 0), Node(1, 0)
    log = Writer(0, group_of(0, 1, 2)).call("all_reduce", 5, ddp=bucket()).log()
    book = RuleRunner(3, log=lambda rank: log, rules=[Divergence], has_all_logs=False)
    zero.comparing = SharedRules(zero.hand, lambda: book)
    notes = {rank: train(node, 200) for rank, node in enumerate((zero, second, one))}
    one.comparing.feed({2: [entry for noted_ns, entry in notes[2] if noted_ns < 39 * S // 10]}, 39 * S // 10)
    one.give(zero, 39 * S // 10)
    here = {rank: [entry for noted_ns, entry in notes[rank] if noted_ns <= 4 * S] for rank in (0, 1)}
    assert zero.comparing.feed(here, 4 * S) == []  # its first look since the start
    one.comparing.feed({2: [entry for noted_ns, entry in notes[2] if noted_ns >= 39 * S // 10]}, 5 * S)
    one.give(zero, 5 * S)
    assert zero.comparing.feed({}, 5 * S) == []
    assert zero.comparing.faults == []
