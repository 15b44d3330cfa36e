# SPDX-License-Identifier: Apache-2.0
"""What a rank raised, as a finding."""

from __future__ import annotations

import sysconfig
import threading
from dataclasses import replace

import pytest

from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.watch.companion import (
    CallbackThread,
    find_known_error,
    find_with_cause,
    is_explained,
    put_first,
    without_waits,
)
from ddpilot.watch.options import FindingCallback
from ddpilot.watch.report import Report
from ddpilot.watch.snapshot.model import RankException

TRACEBACK = f"""Traceback (most recent call last):
  File "train.py", line 88, in train
    loss.backward()
  File "{sysconfig.get_paths()["purelib"]}/torch/_tensor.py", line 600, in backward
    torch.autograd.backward(
RuntimeError: Expected to mark a variable ready only once.
"""


def test_find_known_error_names_the_page_and_the_users_line() -> None:
    """The innermost line that is not of an installed library, with its text."""
    message = "Expected to mark a variable ready only once. This error is caused by one of the following reasons"
    finding = find_known_error(1, RankException(type_name="RuntimeError", message=message, traceback=TRACEBACK))
    assert finding is not None
    assert (finding.code, finding.name, finding.ranks) == ("DDP311", "ready-twice", (1,))
    assert str(finding.place) == "train.py:88  loss.backward()"
    assert finding.fix == "`checkpoint(..., use_reentrant=False)`."


def test_find_known_error_is_silent_about_what_no_page_knows() -> None:
    """A user's own exception says itself what it is."""
    assert find_known_error(0, RankException(type_name="KeyError", message="'label'", traceback=TRACEBACK)) is None
    message = "`result` cannot be pickled: TypeError: cannot pickle 'generator' object"
    assert find_known_error(0, RankException(type_name="ShipError", message=message, traceback=TRACEBACK)) is None


CHAIN = """Traceback (most recent call last):
  File "train.py", line 31, in connect
    dist.init_process_group("gloo", timeout=timeout)
  File "<frozen torch>", line 190, in _create_c10d_store
torch.distributed.DistNetworkError: The client socket has timed out after 3000ms while trying to connect to (head, 23).

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 40, in main
    connect(url)
SetupError: no training after 2 attempts
"""


def test_an_error_that_was_raised_from_another_one_is_explained_by_that() -> None:
    """With the line of the first one, also where the program has its own words for it."""
    error = RankException(type_name="SetupError", message="no training after 2 attempts", traceback=CHAIN)
    finding = find_known_error(0, error)
    assert finding is not None
    assert (finding.code, str(finding.place)) == (
        "DDP104",
        'train.py:31  dist.init_process_group("gloo", timeout=timeout)',
    )
    assert "timed out after 3000ms" in finding.evidence[0]


NO_GUARD = "RuntimeError: An attempt has been made to start a new process before the current process has finished its"
WRITTEN = (f"{NO_GUARD} bootstrapping phase.", "    idx, data = self._get_data()")


@pytest.mark.parametrize(
    ("type_name", "message", "code"),
    [
        ("RuntimeError", "DataLoader worker (pid(s) 29880) exited unexpectedly", "DDP111"),
        ("CalledProcessError", "Command '['python', 'x.py']' returned non-zero exit status 1.", "DDP111"),
        ("SystemExit", "", "DDP111"),
        ("ValueError", "a label is missing", None),
        ("RuntimeError", "Expected to mark a variable ready only once.", "DDP311"),
    ],
)
def test_what_a_child_wrote_explains_an_error_that_only_says_that_it_ended(
    type_name: str, message: str, code: str | None
) -> None:
    """And no other: what a rank wrote before it raised something of its own may be of anything."""
    found = find_known_error(0, RankException(type_name=type_name, message=message, traceback=TRACEBACK), WRITTEN)
    assert (found.code if found is not None else None) == code
    assert found is None or code != "DDP111" or found.evidence == (f"{NO_GUARD} bootstrapping phase.",)


def test_a_rank_that_was_started_is_not_told_to_be_started() -> None:
    """Its launcher has set what is missing: the program has removed it."""
    error = RankException(type_name="KeyError", message="'LOCAL_RANK'", traceback=TRACEBACK)
    found = find_known_error(0, error)
    assert found is not None
    assert found.code == "DDP102"
    assert found.fix.startswith("The launcher has set RANK, LOCAL_RANK, WORLD_SIZE")


def test_a_worker_that_left_no_word_is_a_worker_that_ended() -> None:
    """As one that the kernel has killed."""
    message = "DataLoader worker (pid(s) 29880) exited unexpectedly"
    found = find_known_error(
        0, RankException(type_name="RuntimeError", message=message, traceback=TRACEBACK), ("epoch 1",)
    )
    assert found is not None
    assert found.code == "DDP607"


@pytest.mark.parametrize(
    ("known", "recorded", "adds_nothing"),
    [
        ("DDP202", ["DDP203"], True),
        ("DDP202", ["DDP208"], True),
        ("DDP202", ["DDP303"], True),
        ("DDP603", ["DDP202"], True),
        ("DDP603", ["DDP209"], False),
        ("DDP202", ["DDP209"], False),
        ("DDP202", ["DDP406"], False),
        ("DDP202", [], False),
        ("DDP218", ["DDP201"], True),
        ("DDP308", ["DDP212"], True),
        ("DDP308", ["DDP310"], True),
        ("DDP308", ["DDP207"], False),
        ("DDP103", ["DDP207"], False),
        ("DDP301", ["DDP304"], True),
        ("DDP301", ["DDP402"], False),
        ("DDP209", [], True),
    ],
)
def test_what_was_recorded_goes_before_what_a_message_may_mean(
    known: str, recorded: list[str], adds_nothing: bool
) -> None:
    """gloo says that sizes differ whatever ranks do not agree about."""
    assert is_explained(finding(known), [finding(code) for code in recorded]) is adds_nothing


@pytest.mark.parametrize(("known", "left"), [("DDP104", ["DDP402"]), ("DDP110", ["DDP215", "DDP402"]), (None, None)])
def test_waits_for_a_rank_that_could_not_reach_the_others_are_consequences(
    known: str | None, left: list[str] | None
) -> None:
    """And are not shown beside the reason."""
    recorded = [finding("DDP215"), finding("DDP402")]
    kept = without_waits(recorded, finding(known) if known is not None else None)
    assert [each.code for each in kept] == (["DDP215", "DDP402"] if left is None else left)


def test_what_to_do_goes_by_what_is_known_and_not_by_the_message() -> None:
    """torch counts a parameter that is frozen on one rank as missing there."""
    frozen = replace(finding("DDP304"), fix="freeze the same layers")
    findings = [frozen]
    assert put_first(finding("DDP301"), findings) == "freeze the same layers"
    assert findings == [frozen]
    assert put_first(finding("DDP110"), findings) == ""
    assert [each.code for each in findings] == ["DDP110", "DDP304"]


def finding(code: str) -> Finding:
    """Any of this code."""
    return Finding(code=code, name="any", severity="error", summary=code)


LIMIT_S = 10.0


def report(*codes: str) -> Report:
    """One with a finding for each of `codes`."""
    made = [
        Finding(code=code, name="n", severity="error", summary="s", ranks=(0,), why="w", fix="f", source="x")
        for code in codes
    ]
    return Report(job="j", name="train", world_size=2, findings=Findings(made))


def test_unused_parameters_are_explained_by_a_rank_that_comes_later() -> None:
    """It is looked again until that rank is there; once if all ranks have ended, or for another message."""
    looks = [Findings(), Findings(), Findings([finding("DDP212")]), Findings()]

    def find() -> Findings:
        return looks.pop(0)

    assert [each.code for each in find_with_cause(finding("DDP308"), find, lambda: False)] == ["DDP212"]
    looks[:] = [Findings(), Findings([finding("DDP212")])] * 3
    assert not find_with_cause(finding("DDP308"), find, lambda: True)
    assert len(looks) == 5
    assert [each.code for each in find_with_cause(None, find, lambda: False)] == ["DDP212"]
    assert not find_with_cause(finding("DDP311"), find, lambda: False)


def called(on_finding: FindingCallback) -> tuple[CallbackThread, list[str], list[str]]:
    """A caller, what it says, and the codes of the reports that it stops for."""
    said: list[str] = []
    stopped: list[str] = []
    caller = CallbackThread(on_finding, stop=lambda each: stopped.append(each.findings[0].code), say=said.append)
    return caller, said, stopped


def test_a_function_that_takes_long_holds_up_nobody() -> None:
    """What comes meanwhile is given to it afterwards, in order; nobody waits for longer than he says."""
    may_return = threading.Event()
    seen: list[str] = []

    def wait(finding: Finding) -> None:
        seen.append(finding.code)
        may_return.wait(LIMIT_S)

    caller, _, stopped = called(wait)
    caller.call(report("DDP201", "DDP204"))
    caller.call(report("DDP209"))
    caller.wait(0.01)
    assert seen == ["DDP201"]
    may_return.set()
    caller.wait(LIMIT_S)
    assert seen == ["DDP201", "DDP204", "DDP209"]
    assert stopped == []


def test_an_answer_stops_for_its_report_and_an_error_is_said() -> None:
    """Also where the function has raised for another finding of the same report."""

    def answer(finding: Finding) -> str:
        if finding.code == "DDP204":
            raise LookupError(finding.code)
        return "stop" if finding.code == "DDP209" else ""

    caller, said, stopped = called(answer)
    for codes in (("DDP201",), ("DDP204", "DDP209")):
        caller.call(report(*codes))
    caller.wait(LIMIT_S)
    assert stopped == ["DDP204"]
    assert said == ["`on_finding` raised LookupError: DDP204"]
