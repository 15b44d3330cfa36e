# SPDX-License-Identifier: Apache-2.0
"""Command line entry point: defines the subcommands and their options, and prints errors without a traceback.

No heavy module is imported here, so that `ddpilot --help` takes a fraction of a second.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ddpilot.errors import DdpilotError

ERROR_STATUS = 2

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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
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


@app.command()
def topology(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Print the rank and the job of this process."""
    from ddpilot.cli.machine_commands import describe_topology

    print(describe_topology(as_json=json))


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

    print(explain(sys.stdin.read() if words == ["-"] else " ".join(words or ())), end="")


@app.command()
def lint(
    paths: Annotated[list[str], typer.Argument(help="Scripts, notebooks or folders.")],
    select: Annotated[
        str, typer.Option(metavar="CODES", help="Codes to report; DDP4 stands for all that begin with it.")
    ] = "",
    ignore: Annotated[str, typer.Option(metavar="CODES", help="Codes not to report.")] = "",
    format_: Annotated[str, typer.Option("--format", help="text, json, sarif or github.")] = "text",
    fix: Annotated[bool, typer.Option("--fix", help="Print the safe fixes as a diff, and make them.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print the safe fixes as a diff only.")] = False,
) -> None:
    """Report DDP faults of scripts and notebooks without running them; the exit status is 1 if there are any."""
    from ddpilot.cli.lint_command import lint

    raise typer.Exit(lint(paths, select=select, ignore=ignore, output_format=format_, fix=fix, diff=diff))


@app.command()
def watch(
    job: Annotated[
        str | None, typer.Argument(help="A job's id, the number of one of its processes, or its folder.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Report what is new until the job has ended.")] = False,
) -> None:
    """Report what a job is waiting for or why it ended, while it runs or afterwards; without a job, list jobs."""
    from ddpilot.cli.watch_command import watch_job

    raise typer.Exit(watch_job(job, as_json=json, wait=wait))


@app.command()
def build_recorder() -> None:
    """Compile the recorder's C++ part, which makes recording cheap, once per release of torch; needs a C++ compiler."""
    from ddpilot.cli.machine_commands import build_recorder

    print(build_recorder(), end="")


@app.command()
def gpu_check(
    names: Annotated[list[str] | None, typer.Argument(help="Checks to run; all if none is named.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the checks and what they need.")] = False,
    json: Annotated[
        str, typer.Option("--json", metavar="PATH", help="File for the report.")
    ] = "ddpilot-gpu-check.json",
    time_limit_s: Annotated[
        float | None, typer.Option("--time-limit-s", metavar="S", help="Seconds for each check, in place of its own.")
    ] = None,
) -> None:
    """Check ddpilot's claims about GPUs on this machine: ok, FAILED or cannot be shown here, with the evidence."""
    from pathlib import Path

    from ddpilot.cli.machine_commands import check_gpus, list_checks

    if list_:
        print(list_checks())
    else:
        raise typer.Exit(check_gpus(names or (), json_path=Path(json), limit_s=time_limit_s))


@app.command()
def demo() -> None:
    """Run the quickstart notebook on two ranks."""
    from ddpilot.cli.demo_command import run_demo

    raise typer.Exit(run_demo())


def render_error(error: DdpilotError) -> str:
    """Format an error in up to three lines: what was being done, what was found, what to do."""
    rank = "" if error.rank is None else f"[rank {error.rank}] "
    rows = [f"error: {rank}{error.did}", f"  found: {error.found}"]
    return "\n".join([*rows, f"  fix:   {error.fix}"] if error.fix else rows)


def main() -> None:
    """Entry point of the command. Prints a ddpilot error on stderr without a traceback and exits with status 2."""
    try:
        app()
    except DdpilotError as error:
        print(render_error(error), file=sys.stderr)
        sys.exit(ERROR_STATUS)
