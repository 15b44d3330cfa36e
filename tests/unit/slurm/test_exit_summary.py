# SPDX-License-Identifier: Apache-2.0
"""Why jobs ended, from records and output as a real Slurm has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpilot.slurm.exit_summary import summarize_exit, summarize_requeue
from ddpilot.slurm.follow import describe_job
from ddpilot.slurm.records import JobRecord

FAILED = JobRecord(job_id="7", state="FAILED", run_time="00:01:00", time_limit="02:00:00", exitcode=143, memory="4G")


def test_first_error_of_the_output_is_shown_with_its_task() -> None:
    """By the order of the output, and without the messages of those that srun ended afterwards."""
    output = (
        "0: step 1\n"
        "2: Traceback (most recent call last):\n"
        '2:   File "train.py", line 3, in <module>\n'
        "0: [rank0]: something else\n"
        "2: ValueError: bad sample 17\n"
        "srun: error: n2: task 2: Exited with exit code 1\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
        "0: slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-27T22:26:10 ***\n"
        "srun: error: n1: tasks 0-1: Terminated\n"
    )
    assert str(summarize_exit(FAILED, output=output)) == (
        "job 7 ended after 00:01:00 (FAILED): exit code 1 of task 2, after which srun ended the others\n"
        "  first error in the output: task 2: ValueError: bad sample 17\n"
        "  task 2 on n2: exited with exit code 1"
    )


def test_note_of_the_rank_comes_first() -> None:
    """It has the update."""
    summary = summarize_exit(FAILED, failure="after 7 updates: ValueError: bad\n", output="0: Traceback (most")
    assert summary.details == ("first failure: after 7 updates: ValueError: bad",)


def test_memory_is_named_where_the_kernel_killed_a_task() -> None:
    """By the node's daemon in the output, or by the state of a step; with what the step used."""
    line = (
        "slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have been killed "
        "by the cgroup out-of-memory handler.\nsrun: error: n1: task 0: Out Of Memory\n"
    )
    step = JobRecord(job_id="7.0", state="OUT_OF_MEMORY", memory="4093M")
    for summary in (summarize_exit(FAILED, output=line), summarize_exit(FAILED, steps=[step])):
        assert summary.cause.endswith(
            "(FAILED, OUT_OF_MEMORY): it used more memory than it had asked for, and the kernel killed a process of it"
        )
        assert "--mem" in summary.advice
    assert "step 7.0 used 4093M at most; asked for was 4G" in summarize_exit(FAILED, steps=[step]).details
    assert "task 0 on n1: out of memory" in summarize_exit(FAILED, output=line).details


def test_preemption_time_limit_and_lost_nodes_are_named_also_where_the_ranks_ended_first() -> None:
    """The job's own state is then FAILED or CANCELLED."""
    cut = "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-27T22:19:53 DUE TO {} ***\n"
    cases = {
        "PREEMPTED": summarize_exit(replace(FAILED, preempted="2026-11-27T22:19:53")),
        "TIMEOUT": summarize_exit(FAILED, output=cut.format("TIME LIMIT")),
        "NODE_FAIL": summarize_exit(replace(FAILED, state="CANCELLED"), output="srun: error: Node failure on n2\n"),
    }
    for state, summary in cases.items():
        assert f", {state}): " in summary.cause
    assert "its time limit of 02:00:00 was reached" in cases["TIMEOUT"].cause
    assert cases["NODE_FAIL"].details == ("Node failure on n2",)


def test_a_step_that_no_user_has_cancelled_was_terminated_by_slurm() -> None:
    """sacct has no word for a preemption at whose SIGTERM the ranks have left; scontrol has."""
    output = "slurmstepd-n3: error: *** STEP 7.0 ON n3 CANCELLED AT 2026-11-28T15:31:26 ***\n"
    step = JobRecord(job_id="7.0", state="CANCELLED", exit_signal=15)
    accounted = replace(FAILED, is_accounted=True)
    found = summarize_exit(accounted, steps=[step], output=output)
    assert "Slurm sent SIGTERM to step 7.0, which no user had cancelled: a preemption does so" in found.cause
    for job, ended in ((accounted, replace(step, cancelled_by="1000")), (FAILED, step)):
        assert (
            "step 7.0 was cancelled, as `scancel 7.0` does" in summarize_exit(job, steps=[ended], output=output).cause
        )


def test_signals_are_named() -> None:
    """Whether Slurm or a shell counted them."""
    assert summarize_exit(replace(FAILED, exitcode=0, exit_signal=9)).cause.endswith("it was killed by SIGKILL")
    assert summarize_exit(replace(FAILED, exitcode=138)).cause.endswith("exit code 138, SIGUSR1")
    assert summarize_exit(replace(FAILED, exitcode=2)).cause.endswith("(FAILED): exit code 2")


def test_completed_job_is_said_in_one_line() -> None:
    """With how often it was requeued."""
    done = replace(FAILED, state="COMPLETED", num_restarts=2)
    assert str(summarize_exit(done)) == "job 7 completed after 00:01:00, requeued 2x before"


def test_pending_job_is_described_with_reason_and_start() -> None:
    """The reason in Slurm's word and in plain ones."""
    record = JobRecord(job_id="7", state="PENDING", reason="Priority", start="2026-11-27T23:00:00")
    assert describe_job(record) == (
        "job 7 is pending: Priority (jobs of higher priority are in front), expected to start at 2026-11-27T23:00:00"
    )


KILLED_RANK = (
    "srun: error: n2: task 1: Exited with exit code 137\n"
    "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
    "0: slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-28T04:27:12 ***\n"
    "0: [rank0]: Traceback (most recent call last):\n"
    "0: [rank0]: RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:44235\n"
    "srun: error: n1: task 0: Exited with exit code 1\n"
)
"""Output of a job of which a rank was killed: the other one fails because of it, with a lower exit code."""


def test_killed_rank_is_the_cause_and_not_the_one_that_lost_its_connection() -> None:
    """By the order of srun's lines; the exception of the other rank is not shown as the first error."""
    summary = summarize_exit(replace(FAILED, exitcode=137, nodes="n[1-2]"), output=KILLED_RANK)
    assert summary.cause.endswith("task 1 on n2 was killed by SIGKILL, after which srun ended the others")
    assert "first error" not in str(summary)
    assert summary.details[0] == "task 1 on n2: exited with exit code 137"
    assert summary.details[-1] == "it ran on n[1-2]"
    assert "`dmesg`" in summary.advice


def test_error_is_found_behind_the_label_that_torch_adds() -> None:
    """And an error of a lost connection that came before it is passed over."""
    output = KILLED_RANK + "1: [rank1]: Traceback (most recent call last):\n1: [rank1]: ValueError: bad sample 17\n"
    assert (
        "first error in the output: task 1: ValueError: bad sample 17" in summarize_exit(FAILED, output=output).details
    )


def test_cancelled_step_is_named() -> None:
    """srun counts its tasks as killed, after the step was cancelled."""
    output = (
        "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n"
        "0: slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-28T04:27:04 ***\n"
        "srun: error: n2: task 1: Killed\n"
    )
    summary = summarize_exit(replace(FAILED, exitcode=137), output=output)
    assert summary.cause.endswith("step 7.0 was cancelled, as `scancel 7.0` does")
    assert summary.details == ()


def test_output_of_an_earlier_start_does_not_explain_this_one() -> None:
    """A job that lost a node, was requeued, and then raised."""
    output = (
        "srun: error: Node failure on n2\njob 7 starts again on n[3-4]\n"
        "0: Traceback (most recent call last):\n0: ValueError: bad sample 17\n"
    )
    summary = summarize_exit(replace(FAILED, exitcode=1, num_restarts=1), output=output)
    assert "(FAILED, requeued 1x before): exit code 1" in summary.cause
    assert summary.details == ("first error in the output: task 0: ValueError: bad sample 17",)


def test_lost_node_and_full_folder_are_named() -> None:
    """Which Slurm's node records and the file system know, where the output does not."""
    summary = summarize_exit(replace(FAILED, state="NODE_FAIL"), lost_nodes={"n2": "Not responding"})
    assert summary.cause.endswith("(NODE_FAIL): node n2 failed (Not responding)")
    summary = summarize_exit(replace(FAILED, exitcode=1), full_folder="/shared")
    assert summary.details[0] == "no space is left in /shared, where its output is"
    assert "make room" in summary.advice


@pytest.mark.parametrize(
    ("output", "lost", "said"),
    [
        ("", {"n2": "Not responding"}, "node n2 failed (Not responding)"),
        ("x\nsrun: error: Node failure on n2\n", {}, "a node failed"),
        (
            "0: ddpilot: SIGUSR1: the checkpoint in ckpt is written; leaving\nexit code 75: job 7 is requeued\n",
            {},
            "its ranks saved a checkpoint and exited with code 75 after SIGUSR1, which comes before the time limit",
        ),
        ("exit code 1: job 7 is requeued\n", {}, "exit code 1, which is tried once more"),
        (
            "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-28T04:27:22 DUE TO JOB REQUEUE ***\n",
            {},
            "by `scontrol requeue`, or by an administrator",
        ),
        (
            "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-28T04:27:22 DUE TO PREEMPTION ***\n",
            {},
            "a job of higher priority took its nodes",
        ),
    ],
)
def test_requeue_is_explained(output: str, lost: dict[str, str], said: str) -> None:
    """From the nodes' records and the output since the last start."""
    before = replace(FAILED, state="RUNNING", exitcode=0, nodes="n[1-2]")
    summary = summarize_requeue(
        before, output=f"exit code 9: job 7 is requeued\njob 7 starts again on n1\n{output}", lost_nodes=lost
    )
    assert summary.cause == f"job 7 was requeued after 00:01:00 on n[1-2]: {said}"


def test_failure_that_ddpilot_run_reports_is_the_first() -> None:
    """With the node and the rank, whose agent has an exit code of its own."""
    line = "1: ddpilot: rank 1 was killed by SIGKILL; its peak was 0.3 GB (running `train.py` on 2 ranks on n2)\n"
    details = summarize_exit(FAILED, output=line + KILLED_RANK.replace("137", "1")).details
    assert details[0] == "first failure: on n2: rank 1 was killed by SIGKILL; its peak was 0.3 GB"


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        ("1: task: line 5: exec: python3.2: not found", "task: line 5: exec: python3.2: not found"),
        ("/var/spool/slurm/job7/slurm_script: line 9: module: command not found", None),
        ("0: FATAL:   could not open image old.sif", "FATAL:   could not open image old.sif"),
        ("srun: unrecognized option '--container-image=x'", "srun: unrecognized option '--container-image=x'"),
    ],
)
def test_program_that_could_not_be_started_is_shown(line: str, detail: str | None) -> None:
    """In the words of the shell, of Apptainer or of srun."""
    record = replace(FAILED, exitcode=255)
    assert summarize_exit(record, output=f"0: hello\n{line}\nmore\n").details == (detail or line,)
    assert summarize_exit(record, output="0: the key was not found in the cache\n").details == ()


def test_command_that_was_not_found_has_an_advice() -> None:
    """Exit code 127 is the shell's."""
    summary = summarize_exit(replace(FAILED, exitcode=127))
    assert summary.cause.endswith("exit code 127, a command was not found")
    assert "--modules" in summary.advice


def test_of_chained_tracebacks_the_last_is_the_error() -> None:
    """It is what the program raised, and has the advice; what it was raised from is above it in the output."""
    output = (
        "0: Traceback (most recent call last):\n0: KeyError: 'a'\n0: \n"
        "0: The above exception was the direct cause of the following exception:\n0: \n"
        "0: Traceback (most recent call last):\n0: ValueError: no sample 'a'\n"
    )
    summary = summarize_exit(FAILED, output=output)
    assert summary.details[0] == "first error in the output: task 0: ValueError: no sample 'a'"


@pytest.mark.parametrize(
    ("state", "code", "number", "said"),
    [
        ("FAILED", 1, 0, "exit code 1 of step 7.0"),
        ("CANCELLED", 0, 9, "step 7.0 was ended by SIGKILL"),
        ("COMPLETED", 0, 0, "exit code 143, SIGTERM"),
    ],
)
def test_accounts_of_the_step_tell_how_its_ranks_ended(state: str, code: int, number: int, said: str) -> None:
    """Where the output is not there."""
    job = JobRecord(job_id="7", state="FAILED", exitcode=143)
    batch = JobRecord(job_id="7.batch", state="FAILED", exitcode=143)
    step = JobRecord(job_id="7.0", state=state, exitcode=code, exit_signal=number)
    assert summarize_exit(job, steps=[batch, step]).cause == f"job 7 ended (FAILED): {said}"


def test_a_job_that_asks_for_more_than_its_partition_has_is_explained() -> None:
    """Slurm accepts it, and leaves it pending."""
    record = JobRecord(job_id="12", state="PENDING", reason="PartitionConfig")
    assert describe_job(record) == (
        "job 12 is pending: PartitionConfig (its partition does not have that many nodes, CPUs or GPUs)"
    )
