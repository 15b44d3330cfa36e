# SPDX-License-Identifier: Apache-2.0
"""Command line entry point: defines the subcommands and their options, and prints errors without a traceback.

No heavy module is imported here, so that `ddpilot --help` takes a fraction of a second.
"""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ddpilot.errors import DdpilotError

ERROR_STATUS = 2
INTERRUPT_GRACE_S = 10.0

# Module name and the name of the package that provides it.
_NEEDED = {
    "ipykernel": "ipykernel",
    "matplotlib": "matplotlib",
    "nbclient": "nbclient",
    "nbformat": "nbformat",
    "sklearn": "scikit-learn",
}

# Without rich's markup, because importing rich would double the time of --help.
app = typer.Typer(
    name="ddpilot",
    help="Train with DistributedDataParallel from a notebook, a script or Slurm, and diagnose failures by rank.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"ddpilot {version('ddpilot')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class _Raw(TyperCommand):
    """A command without option parsing; `ddpilot run` separates its own options from the script's itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return []


@app.command(cls=_Raw, add_help_option=False)
def run(context: typer.Context) -> None:
    """Run a script on several ranks, as torchrun does."""
    from ddpilot.cli.run_command import run_words

    raise typer.Exit(run_words(context.args, render_error, os.environ))


@app.command(cls=_Raw, add_help_option=False)
def slurm(context: typer.Context) -> None:
    """Run a script as a Slurm job: show the job script, submit it, follow its output; follow, status, cancel."""
    from ddpilot.cli.slurm_command import run_words

    raise typer.Exit(run_words(context.args))


@app.command(cls=_Raw, add_help_option=False)
def k8s(context: typer.Context) -> None:
    """Print the manifest of a script's job for Kubernetes: a PyTorchJob or a JobSet."""
    from ddpilot.cli.k8s_command import run_words

    raise typer.Exit(run_words(context.args))


@app.command()
def topology(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Print the rank and the job of this process."""
    from dataclasses import asdict
    from json import dumps

    from ddpilot.environments.detect import detect_topology

    found = detect_topology(os.environ)
    print(dumps(asdict(found), indent=2) if json else found)


@app.command()
def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A code (DDP201), a name (desync), a message as printed, or plain words (hang); - reads stdin."
        ),
    ] = None,
) -> None:
    """Explain a finding or an error message and how to fix it; without words, list all findings."""
    from ddpilot.cli.explain_command import explain

    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(explain(sys.stdin.read() if words == ["-"] else " ".join(words or ()), color=color), end="")


@app.command()
def lint(
    paths: Annotated[list[str], typer.Argument(help="Scripts, notebooks or folders.")],
    select: Annotated[
        str, typer.Option(metavar="CODES", help="Codes to report; DDP4 stands for all codes that begin with it.")
    ] = "",
    ignore: Annotated[str, typer.Option(metavar="CODES", help="Codes not to report.")] = "",
    format_: Annotated[str, typer.Option("--format", help="text, json, sarif or github.")] = "text",
    fix: Annotated[bool, typer.Option("--fix", help="Print the safe fixes as a diff, and apply them.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Only print the safe fixes as a diff.")] = False,
) -> None:
    """Report DDP faults of scripts and notebooks without running them.

    The exit status is 1 if there are any.
    """
    from ddpilot.cli.lint_command import lint

    raise typer.Exit(lint(paths, select=select, ignore=ignore, output_format=format_, fix=fix, diff=diff))


@app.command()
def watch(
    job: Annotated[
        str | None, typer.Argument(help="A job's id, the number of one of its processes, or its folder.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Report further changes until the job has ended.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print all findings in full.")] = False,
) -> None:
    """Report what a job is waiting for or why it ended, while it runs or afterwards; without a job, list jobs."""
    from ddpilot.cli.watch_command import watch_job

    raise typer.Exit(watch_job(job, as_json=json, wait=wait, verbose=verbose))


@app.command()
def gpu_check(
    names: Annotated[list[str] | None, typer.Argument(help="Checks to run; all if none is named.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the checks and what they need.")] = False,
    json: Annotated[
        str, typer.Option("--json", metavar="PATH", help="File for the report.")
    ] = "ddpilot-gpu-check.json",
    time_limit_s: Annotated[
        float | None,
        typer.Option("--time-limit-s", metavar="S", help="Seconds for each check, instead of its default."),
    ] = None,
) -> None:
    """Check ddpilot's claims about GPUs on this machine: ok, FAILED or cannot be shown here, with the evidence."""
    from ddpilot.gpu_check.catalogue import CHECKS, choose_checks
    from ddpilot.gpu_check.runner import render_summary, run_checks

    if list_:
        print("\n".join(f"{check.name:<33}  {check.needs:<9}  {check.claim}" for check in CHECKS))
        return
    checks = choose_checks(names or ())
    if time_limit_s is not None and not time_limit_s > 0:
        raise DdpilotError("reading --time-limit-s", found=f"{time_limit_s:g}", fix="Give seconds, more than 0")
    path = Path(json)
    results = run_checks(checks, json_path=path, limit_s=time_limit_s, show=lambda line: print(line, flush=True))
    print(render_summary(results, path))
    raise typer.Exit(int(any(each.outcome.status == "failed" for each in results)))


_NcclLogs = Annotated[
    list[str] | None,
    typer.Option("--nccl-log", metavar="FILE", help="Explain a log of NCCL_DEBUG=INFO; may be repeated."),
]


@app.command(context_settings={"allow_extra_args": True})
def doctor(
    context: typer.Context,
    program: Annotated[
        str | None,
        typer.Argument(
            help="Check this script, or script.py:function, step by step. Without it, check the machine. With --nodes, "
            "check whether all nodes have the same code.",
            metavar="[PROGRAM]",
        ),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option("-n", "--nproc-per-node", help="Ranks on this machine; by default one per accelerator, else 2."),
    ] = None,
    updates: Annotated[int, typer.Option("--updates", min=1, help="With PROGRAM, optimizer steps of each run.")] = 5,
    workers: Annotated[int | None, typer.Option("--workers", min=0, help="DataLoader workers of each rank.")] = None,
    checkpoint_dir: Annotated[
        str, typer.Option("--checkpoint-dir", metavar="PATH", help="Folder in which checkpoints will be saved.")
    ] = ".",
    live: Annotated[bool, typer.Option("--live/--no-live", help="Start ranks and measure what they exchange.")] = True,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="This process is a rank of a job (torchrun, srun): check all its nodes.")
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout-s", metavar="S", min=0.1, help="With --nodes, seconds to wait for the other ranks."),
    ] = 30.0,
    reach: Annotated[
        list[str] | None,
        typer.Option("--reach", metavar="HOST:PORT", help="An address that the job needs; may be repeated."),
    ] = None,
    nccl_log: _NcclLogs = None,
    json: Annotated[bool, typer.Option("--json", help="Print the lines as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print every line in full.")] = False,
) -> None:
    """Check this machine, or a program, before a job runs: what was found and what to do. Words after --
    are passed to the program.

    The exit status is 1 if something is wrong.
    """
    from pathlib import Path

    from ddpilot.cli.doctor_command import explain_nccl_log, run_doctor, run_program_doctor

    if nccl_log:
        raise typer.Exit(explain_nccl_log(nccl_log, as_json=json, verbose=verbose))
    options: dict[str, Any] = {"nproc_per_node": nproc_per_node, "num_workers": workers, "live": live}
    options |= {"checkpoint_dir": Path(checkpoint_dir), "as_json": json, "verbose": verbose}
    if program is not None and not nodes:
        if reach:
            raise typer.BadParameter("--reach checks machines: leave out the program, or add --nodes")
        raise typer.Exit(run_program_doctor(program, context.args, num_updates=updates, **options))
    raise typer.Exit(run_doctor(timeout_s=timeout_s, nodes=nodes, script=program, reach=reach or (), **options))


@app.command(context_settings={"allow_extra_args": True})
def verify(
    context: typer.Context,
    program: Annotated[str, typer.Argument(help="A script, or script.py:function.", metavar="PROGRAM")],
    nproc_per_node: Annotated[
        int | None,
        typer.Option("-n", "--nproc-per-node", help="Ranks to compare with one; by default one per GPU, at least 2."),
    ] = None,
    updates: Annotated[int, typer.Option("--updates", min=0, help="Optimizer steps to compare; 0: all.")] = 5,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", metavar="S", min=0.1, help="Seconds for each run.")
    ] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print a line for each update.")] = False,
) -> None:
    """Compare what a program computes on one rank and on several; words after -- are passed to it.

    The exit status is 1 if the numbers differ by more than rounding, or cannot be compared.
    """
    from ddpilot.cli.doctor_command import run_verify

    status = run_verify(
        program,
        context.args,
        nproc_per_node=nproc_per_node,
        num_updates=updates or None,
        timeout_s=timeout_s,
        as_json=json,
        verbose=verbose,
    )
    raise typer.Exit(status)


_Nnodes = Annotated[int, typer.Option("--nnodes", min=1, help="Number of nodes; start the command on each.")]
_NodeRank = Annotated[int, typer.Option("--node-rank", min=0, help="Rank of this node; node 0 reports.")]
_MasterAddr = Annotated[str | None, typer.Option("--master-addr", metavar="HOST", help="Name or address of node 0.")]
_MasterPort = Annotated[
    int | None, typer.Option("--master-port", metavar="PORT", help="Port of node 0; 29500 on several nodes.")
]


@app.command(context_settings={"allow_extra_args": True})
def profile(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A script.", metavar="SCRIPT")],
    nproc_per_node: Annotated[
        str, typer.Option("-n", "--nproc-per-node", help="Ranks on this machine: a number, auto, gpu or cpu.")
    ] = "auto",
    nnodes: _Nnodes = 1,
    node_rank: _NodeRank = 0,
    master_addr: _MasterAddr = None,
    master_port: _MasterPort = None,
    html: Annotated[str, typer.Option("--html", metavar="PATH", help="File for the report with its pictures.")] = "",
    trace: Annotated[
        str, typer.Option("--trace", metavar="DIR", help="Folder for traces of 5 updates that Perfetto opens.")
    ] = "",
    trace_window: Annotated[
        str,
        typer.Option(
            "--trace-window",
            metavar="N,N,N,N",
            help="With --trace, updates to leave out, to warm up and to keep, and how often; 3,1,5,1 by default.",
        ),
    ] = "",
    trace_memory: Annotated[bool, typer.Option("--trace-memory", help="With --trace, allocations as well.")] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Mark phases as NVTX ranges, which Nsight shows.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the profile as JSON, and no output of the script.")
    ] = False,
) -> None:
    """Show where the time of an update goes on each rank, and what to change.

    Words after -- are passed to the script.
    """
    from ddpilot.cli.profile_command import read_rank_options, run_profile
    from ddpilot.launching.elastic.options import RunOptions

    options = RunOptions(
        target=script,
        args=tuple(context.args),
        nproc_per_node=int(nproc_per_node) if nproc_per_node.isdecimal() else nproc_per_node,
        nnodes=(nnodes, nnodes),
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
    )
    rank_options = read_rank_options(trace_window, memory=trace_memory, nvtx=nvtx, has_trace=bool(trace))
    raise typer.Exit(run_profile(options, html=html, trace=trace, as_json=json, rank_options=rank_options))


@app.command(context_settings={"allow_extra_args": True})
def scale(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A script that reads samples through a DataLoader.", metavar="SCRIPT")],
    nproc_per_node: Annotated[
        str, typer.Option("-n", "--nproc-per-node", metavar="N,N", help="Numbers of ranks to compare, on a node.")
    ] = "1,2",
    nnodes: _Nnodes = 1,
    node_rank: _NodeRank = 0,
    master_addr: _MasterAddr = None,
    master_port: _MasterPort = None,
    predict: Annotated[
        str | None,
        typer.Option(
            "--predict", metavar="N,N", help="Numbers of ranks to predict; by default twice the largest of -n."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Runs at each number of ranks.")] = 2,
    html: Annotated[str, typer.Option("--html", metavar="PATH", help="File for the report with its pictures.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compare the speed of a script at several numbers of ranks, and report what limits the speed-up."""
    from ddpilot.cli.profile_command import run_scale
    from ddpilot.launching.elastic.options import RunOptions

    options = RunOptions(
        target=script,
        args=tuple(context.args),
        nnodes=(nnodes, nnodes),
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
    )
    raise typer.Exit(run_scale(options, sizes=nproc_per_node, rounds=rounds, as_json=json, predict=predict, html=html))


@app.command(context_settings={"allow_extra_args": True})
def tune(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A script.", metavar="SCRIPT")],
    nproc_per_node: Annotated[
        str, typer.Option("-n", "--nproc-per-node", help="Ranks on this machine: a number, auto, gpu or cpu.")
    ] = "auto",
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Maximum number of pairs of runs per option.")] = 5,
    updates: Annotated[int, typer.Option("--updates", help="Updates of each run.")] = 40,
    max_minutes: Annotated[
        float, typer.Option("--max-minutes", metavar="M", min=0.1, help="Time for all runs.")
    ] = 15.0,
    compression: Annotated[
        bool, typer.Option("--compression", help="Also exchange gradients in fewer bits, which changes the numbers.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Profile a script, try options that could make it faster, and print those that do.

    Words after -- are passed to the script.
    """
    from ddpilot.cli.tune_command import run_tune

    status = run_tune(
        script,
        context.args,
        nproc_per_node=nproc_per_node,
        rounds=rounds,
        updates=updates,
        max_minutes=max_minutes,
        compression=compression,
        as_json=json,
    )
    raise typer.Exit(status)


@app.command()
def demo() -> None:
    """Run the quickstart notebook on two ranks."""
    script = find_quickstart(Path(__file__).resolve().parents[1])
    absent = [package for name, package in _NEEDED.items() if find_spec(name) is None]
    if absent:
        raise DdpilotError(
            "preparing the quickstart",
            found=f"{', '.join(absent)} not installed in {sys.executable}",
            fix=f"Run `{sys.executable} -m pip install {' '.join(absent)}`, or `make demo` in the source tree",
        )
    with subprocess.Popen([sys.executable, str(script)]) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The terminal has sent SIGINT to the script too: give it time to stop its kernel, which would outlive it.
            try:
                process.wait(INTERRUPT_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    raise typer.Exit(status)


def find_quickstart(package_dir: Path) -> Path:
    """Path of the script that runs the quickstart, in the `examples` folder next to `src`.

    Raises `DdpilotError` if ddpilot was installed without its source tree.
    """
    script = package_dir.parents[1] / "examples" / "run_quickstart.py"
    if not script.is_file():
        raise DdpilotError(
            "looking for the quickstart",
            found=f"no {script}: the examples are part of the source tree, not of the installed package",
            fix="Get the source of ddpilot and run `make demo` in it",
        )
    return script


def render_error(error: DdpilotError) -> str:
    """Format an error in up to three lines: what was being done, what was found, what to do."""
    rank = "" if error.rank is None else f"[rank {error.rank}] "
    rows = [f"error: {rank}{error.did}", f"  found: {error.found}"]
    return "\n".join([*rows, f"  fix:   {error.fix}"] if error.fix else rows)


def main() -> None:
    """Entry point of the command. Prints a ddpilot error on stderr without a traceback and exits with status 2."""
    atexit.register(gc.freeze)  # at the exit of a process that has imported torch, a collection would take 0.3 s
    try:
        app()
    except DdpilotError as error:
        print(render_error(error), file=sys.stderr)
        sys.exit(ERROR_STATUS)
