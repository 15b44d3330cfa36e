# SPDX-License-Identifier: Apache-2.0
"""What Slurm prints about jobs, as Slurm 22.05 printed it."""

from __future__ import annotations

from ddpilot.slurm.records import JobRecord, parse_lost_nodes, parse_sacct, parse_scontrol

PREEMPTED = (
    "JobId=34 JobName=my train=1 UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=429490 Nice=0 Account=(null) "
    "QOS=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=0 Restarts=2 BatchFlag=1 Reboot=0 "
    "ExitCode=143:0 RunTime=00:00:03 TimeLimit=365-00:00:00 TimeMin=N/A SubmitTime=2026-11-27T22:19:50 "
    "EligibleTime=2026-11-27T22:19:50 StartTime=2026-11-27T22:19:50 EndTime=2026-11-27T22:19:53 Deadline=N/A "
    "PreemptEligibleTime=2026-11-27T22:19:50 PreemptTime=2026-11-27T22:19:53 SuspendTime=None Partition=low "
    "AllocNode:Sid=localhost:13035 ReqNodeList=(null) ExcNodeList=(null) NodeList=n[1-4] BatchHost=n1 NumNodes=4 "
    "NumCPUs=64 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=64,node=4,billing=64 Socks/Node=* "
    "NtasksPerN:B:S:C=1:0:*:* CoreSpec=* MinCPUsNode=1 MinMemoryNode=4G MinTmpDiskNode=0 Features=(null) "
    "DelayBoot=00:00:00 OverSubscribe=NO Command=(null) WorkDir=/data/my runs StdErr=/data/my runs/slurm-34.out "
    "StdIn=/dev/null StdOut=/data/my runs/slurm-34.out Power= \n"
)
ARRAY = (
    "JobId=41 ArrayJobId=40 ArrayTaskId=1 JobName=a JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n1\n"
    "JobId=40 ArrayJobId=40 ArrayTaskId=2-3%1 JobName=a JobState=PENDING Reason=JobArrayTaskLimit ExitCode=0:0 "
    "StartTime=Unknown NodeList=\n"
)


def test_scontrol_is_parsed_with_blanks_in_values() -> None:
    """Also an equals sign in the job's name."""
    (record,) = parse_scontrol(PREEMPTED)
    assert record == JobRecord(
        job_id="34",
        number="34",
        state="FAILED",
        name="my train=1",
        reason="NonZeroExitCode",
        nodes="n[1-4]",
        start="2026-11-27T22:19:50",
        end="2026-11-27T22:19:53",
        run_time="00:00:03",
        time_limit="365-00:00:00",
        exitcode=143,
        num_restarts=2,
        preempted="2026-11-27T22:19:53",
        output="/data/my runs/slurm-34.out",
        folder="/data/my runs",
        memory="4G",
    )


def test_tasks_of_an_array_have_their_own_numbers() -> None:
    """As in `squeue`, with the number of their environment apart."""
    first, rest = parse_scontrol(ARRAY)
    assert (first.job_id, first.number, first.phase) == ("40_1", "41", "running")
    assert (rest.job_id, rest.phase, rest.start) == ("40_2-3%1", "pending", "")


def test_sacct_is_parsed_with_its_steps() -> None:
    """The state is one word, and the memory of a step is what it used."""
    text = (
        "7|train|CANCELLED by 1000|0:15|None|n[1-2]|2||2026-11-27T10:00:00|2026-11-27T10:01:00|00:01:00|02:00:00||4G|7|"
        "2026-11-27T09:59:00|/data/a|b\n"
        "7.0|bash|OUT_OF_MEMORY|0:125||n[1-2]|2|4|2026-11-27T10:00:00|2026-11-27T10:01:00|00:01:00||4093M||7.0|"
        "2026-11-27T10:00:00|\n"
        "not of sacct\n"
    )
    job, step = parse_sacct(text)
    assert (job.state, job.exit_signal, job.reason, job.memory, job.phase) == ("CANCELLED", 15, "", "4G", "done")
    assert (job.number, job.folder) == ("7", "/data/a|b")
    assert (job.is_accounted, job.cancelled_by, step.cancelled_by) == (True, "1000", "")
    assert (step.job_id, step.state, step.memory) == ("7.0", "OUT_OF_MEMORY", "4093M")


def account(job: str, state: str, submit: str, raw: str = "12") -> str:
    """A line of sacct."""
    start = f"2026-11-28T11:19:{submit}"
    return f"{job}|rq|{state}|0:0|None|n1|1||{start}|{start}|00:00:00|00:05:00||16000M|{raw}|{start}|/data\n"


def test_exit_codes_of_signals_are_as_scontrol_has_them() -> None:
    """sacct writes 143 as 15."""
    texts = [account("7", "FAILED", "10").replace("|0:0|", f"|{code}|") for code in ("15:0", "9:0", "3:0", "0:15")]
    found = [parse_sacct(text)[0] for text in texts]
    assert [(each.exitcode, each.exit_signal) for each in found] == [(143, 0), (137, 0), (3, 0), (0, 15)]


def test_the_last_of_several_starts_counts_with_its_steps() -> None:
    """In the order of their time; a number that Slurm has used for a different job before is no restart."""
    text = account("12", "FAILED", "50") + account("12.0", "FAILED", "50")
    text += account("12", "REQUEUED", "43") + account("12.batch", "CANCELLED", "43")
    text += account("13", "COMPLETED", "10") + account("13", "TIMEOUT", "20")
    text += account("9_1", "PREEMPTED", "30", "11") + account("9_1", "NODE_FAIL", "31", "11")
    text += account("9_1", "COMPLETED", "32", "11")
    found = {each.job_id: (each.state, each.num_restarts, each.number) for each in parse_sacct(text)}
    assert found == {
        "12": ("FAILED", 1, "12"),
        "12.0": ("FAILED", 0, "12"),
        "13": ("TIMEOUT", 0, "12"),
        "9_1": ("COMPLETED", 2, "11"),
    }


def test_a_record_may_be_about_several_tasks() -> None:
    """As scontrol and sacct write those that wait together."""
    numbers = {
        job_id: JobRecord(job_id=job_id, state="PENDING").task_numbers for job_id in ("7", "7_3", "7_[2-6:2,9%2]")
    }
    assert numbers == {"7": (), "7_3": (3,), "7_[2-6:2,9%2]": (2, 4, 6, 9)}


def test_states_are_pending_running_or_done() -> None:
    """A job that is completing still writes."""
    states = ("PENDING", "CONFIGURING", "REQUEUE_HOLD", "RUNNING", "COMPLETING", "COMPLETED", "TIMEOUT", "NODE_FAIL")
    phases = [JobRecord(job_id="1", state=state).phase for state in states]
    assert phases == ["pending"] * 3 + ["running"] * 2 + ["done"] * 3


def test_nodes_that_are_down_or_silent_are_found_with_the_reason() -> None:
    """As scontrol writes them, with who noted the reason and when."""
    text = (
        "NodeName=n1 Arch=x86_64 State=DOWN* ThreadsPerCore=1 Partitions=all Reason=Not responding [slurm@2026-11-28]\n"
        "NodeName=n2 Arch=x86_64 State=IDLE ThreadsPerCore=1 Partitions=all\n"
        "NodeName=n3 Arch=x86_64 State=MIXED*+DRAIN ThreadsPerCore=1 Partitions=all\n"
    )
    assert parse_lost_nodes(text) == {"n1": "Not responding", "n3": ""}


def test_files_of_a_job_have_the_name_of_its_first_node() -> None:
    """scontrol leaves %N; standard error counts only if it is a different file."""
    line = "JobId=7 JobState=RUNNING NodeList=n[3-4] BatchHost=n3 StdErr={} StdOut=/a/%N-%n.out"
    (record,) = parse_scontrol(line.format("/a/%N-%n.out"))
    assert (record.output, record.error) == ("/a/n3-0.out", "")
    (record,) = parse_scontrol(line.format("/a/%N.err"))
    assert (record.output, record.error) == ("/a/n3-0.out", "/a/n3.err")
