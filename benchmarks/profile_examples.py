# SPDX-License-Identifier: Apache-2.0
"""Profile the examples on one and two ranks, as they are and with each of the changes that could help.

    python -m benchmarks.profile_examples [--rounds 5] [digits gpt gan tabular text]

The examples of `examples/` (a CNN for digits, a GPT, a GAN) and two notebooks that use fastai (a table, and texts of
variable length) run in sessions of 1 and 2 ranks with one thread each, in turn, so that what else the machine does hits
all alike. The changes are replacements in the source, such as a loss that is reduced in every 20th update only. For
each: samples per second, their ratio to one rank of the program as it is, round by round, and the first finding.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import render_ratio, render_values
from ddpilot.profiler.result import Profile
from ddpilot.session.session import Session

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "tests" / "notebook"
SIZES = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program, and how it is run."""

    title: str
    setup: str
    """Run once in each session."""
    fit: str
    """The cell that is profiled."""
    changes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By name: what is replaced in `setup`, and by what."""
    apps: tuple[str, ...] = ()

    def setups(self) -> dict[str, str]:
        """Return `setup` as it is, and with each of the changes."""
        found = {"as it is": self.setup}
        for name, (old, new) in self.changes.items():
            assert old in self.setup, f"{self.title}: the line that is changed is not there"
            found[name] = self.setup.replace(old, new)
        return found


def read_example(name: str) -> str:
    """Return the source of an example without the part that reads the command line."""
    return (ROOT / "examples" / f"{name}.py").read_text("utf-8").partition('\nif __name__ == "__main__":')[0]


def read_notebook(name: str) -> tuple[str, str]:
    """Return the cells of a notebook up to the one that trains, and that one; without what shows samples."""
    cells = json.loads((NOTEBOOKS / "apps" / f"{name}.ipynb").read_text("utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    place = next(at for at, source in enumerate(sources) if "fit_one_cycle" in source)
    lines = [line for line in "\n".join(sources[:place]).splitlines() if "show_batch" not in line]
    return "\n".join(lines), sources[place]


def make_programs() -> dict[str, Program]:
    """Return the programs by name."""
    tabular, text = read_notebook("tabular"), read_notebook("text")
    return {
        "digits": Program(
            title="digits CNN",
            setup=read_example("digits_loop"),
            fit="_ = train(5)",
            changes={
                "loss of every 20th update": (
                    "            losses.append(loop.reduce(loss)",
                    "            if loop.num_updates % 20 == 1:\n                losses.append(loop.reduce(loss)",
                ),
                "batches of 256": ("batch_size: int = 64", "batch_size: int = 256"),
            },
        ),
        "gpt": Program(
            title="GPT",
            setup=read_example("gpt").partition("\ndef main()")[0],
            fit="_ = train(20, 1000, num_files=8, shard=None)",
            changes={
                "loss of every 20th update": (
                    "            losses.append(loop.reduce(loss.detach(),",
                    (
                        "            if loop.num_updates % 20 == 1:\n"
                        "                losses.append(loop.reduce(loss.detach(),"
                    ),
                ),
                "float32": ('precision: Any = "bf16"', 'precision: Any = "fp32"'),
            },
        ),
        "gan": Program(
            title="GAN",
            setup=read_example("gan"),
            fit="_ = train(10)",
        ),
        "tabular": Program(title="table (fastai)", setup=tabular[0], fit=tabular[1], apps=("fastai",)),
        "text": Program(title="texts of variable length (fastai)", setup=text[0], fit=text[1], apps=("fastai",)),
    }


def measure(program: Program, rounds: int) -> None:
    """Run a program as it is and with each change on each number of ranks, in turn, and print what was found."""
    found: dict[tuple[str, int], list[Profile]] = {}
    with ExitStack() as stack:
        sessions = {}
        for name, setup in program.setups().items():
            for size in SIZES:
                options = {"apps": program.apps, "output": "silent", "watch": False}
                env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(NOTEBOOKS / "shims")}
                session = stack.enter_context(Session(size, env=env, **options))  # type: ignore[arg-type]
                session.execute(setup, quiet=True)
                sessions[name, size] = session
        for round_ in range(rounds):
            order = list(sessions)
            for key in order if round_ % 2 == 0 else reversed(order):
                result = sessions[key].execute(program.fit, quiet=True, profile=True)
                assert result.profile is not None, f"{program.title}: {result.no_profile}"
                found.setdefault(key, []).append(result.profile)
    base = [speed_of(each) for each in found["as it is", 1]]
    for (name, size), profiles in found.items():
        speeds = [speed_of(each) for each in profiles]
        ratios = [speed / first for speed, first in zip(speeds, base, strict=True)]
        cells = [
            f"{program.title}, {name}",
            str(size),
            render_values([1e3 * each.phases.update_s for each in profiles], "ms"),
            render_values(speeds, "" if profiles[0].phases.samples_per_s else "updates"),
            render_ratio(ratios),
            f"{100 * statistics.median(exposed(each) for each in profiles):.0f} %",
            first_finding(profiles),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def speed_of(profile: Profile) -> float:
    """Return samples per second; updates per second where samples cannot be counted, as in fastai's tables."""
    return profile.phases.samples_per_s or 1 / float(profile.phases.durations_s.mean())


def exposed(profile: Profile) -> float:
    """Return the share of an update that is waiting or communication."""
    phases = profile.phases
    seconds = phases.share("waiting").mean() + phases.share("communication").mean()
    return float(seconds / phases.durations_s.mean())


def first_finding(profiles: Sequence[Profile]) -> str:
    """Return the code that comes first in most rounds, with its estimate."""
    firsts = [(each.judged[0].finding.code, each.judged[0].factor) for each in profiles if each.judged]
    if not firsts:
        return "none"
    codes = [code for code, _ in firsts]
    code = max(set(codes), key=codes.count)
    factors = [factor for each, factor in firsts if each == code]
    return f"{code} in {codes.count(code)} of {len(profiles)}, {statistics.median(factors):.2f}x"


def main() -> None:
    """Read the options of the command line, and print the table."""
    programs = make_programs()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*programs, []], default=[], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    head = ["program", "ranks", "an update", "samples/s", "ratio to one rank", "exchange", "first finding"]
    print(f"| {' | '.join(head)} |\n| {' | '.join(['---'] * len(head))} |", flush=True)
    for name in options.names or programs:
        measure(programs[name], options.rounds)


if __name__ == "__main__":
    main()
