# SPDX-License-Identifier: Apache-2.0
"""`JobParser`: read the options of a job, for ``ddpilot slurm`` and ``ddpilot k8s``, and pass on unknown ones."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ddpilot.errors import MISSPELT, KubernetesError, SlurmError, did_you_mean
from ddpilot.option_parser import OptionParser

FieldOptions = tuple[tuple[str, str, Callable[[str], Any], str], ...]
"""Flags with slashes between them, placeholder, type and help of options that are one field of the job each."""


class JobParser(OptionParser):
    """Parser of `command`, such as "slurm". `error`: what it raises; `passed_on`: a name for unknown options.

    `substitutes`: by name of an option that is not passed on, what to give in its place.
    """

    def __init__(
        self,
        command: str,
        error: type[SlurmError] | type[KubernetesError],
        passed_on: str,
        *,
        usage: str,
        description: str,
        substitutes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(
            f"ddpilot {command}",
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
            usage=usage,
            description=description,
        )
        self._did = f"reading the options of `ddpilot {command}`"
        self._fix = f"`ddpilot {command} --help` has more"
        self._error = error
        self._passed_on = passed_on
        self._substitutes = substitutes

    def refuse(self, argument: str | None, message: str) -> SlurmError | KubernetesError:
        """Return the error for a wrong value."""
        flag = next((each for each in (argument or "").split("/") if each.startswith("--")), "")
        did = f"reading {flag}" if flag else self._did
        return self._error(did, found=message, fix=self._fix, field=flag.lstrip("-").replace("-", "_"))

    def refuse_unknown(self, words: Sequence[str]) -> SlurmError | KubernetesError:
        """Return the error for a word that belongs to no option."""
        found = f"`{words[0]}` is neither the script nor an option's value"
        fix = f"Arguments of the script come after `--`; {self._passed_on} that are not listed are written --name=value"
        return self._error(self._did, found=found, fix=fix)

    def _refuse_value(self, flag: str, word: str) -> SlurmError | KubernetesError:
        """Return the error for a word that belongs to no option; `flag`: the unknown option before it, or ""."""
        if not flag:
            return self.refuse_unknown([word])
        found = f"`{flag} {word}`: {flag} is not an option here"
        name = flag.lstrip("-").replace("-", "_")
        meant = self._substitutes.get(name) or f"{self._passed_on} are passed through as {flag}={word}"
        fix = f"An argument of the script comes after `--`; {meant}"
        return self._error(self._did, found=found, fix=fix, field=name)

    def add_fields(self, options: FieldOptions) -> None:
        """Add options whose names in the result are those of their first long flags."""
        for names, metavar, read, text in options:
            flags = names.split("/")
            name = next(flag for flag in flags if flag.startswith("--")).lstrip("-").replace("-", "_")
            self.add_argument(*flags, dest=name, metavar=metavar, type=read, help=text)

    def read_job(self, words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str | bool], tuple[str, ...]]:
        """Return the values in `words` by name, options to pass on by name, and the words after ``--``.

        Raises the parser's error for a wrong value, a word that belongs to no option, and a misspelled option.
        """
        end = words.index("--") if "--" in words else len(words)
        try:
            known, unknown = self.parse_known_args(list(words[:end]))
        except argparse.ArgumentError as error:
            raise self.refuse(error.argument_name, error.message) from error
        passed_on: dict[str, str | bool] = {}
        last = ""
        for word in unknown:
            flag, equals, value = word.partition("=")
            if not flag.startswith("--"):
                raise self._refuse_value(last, word)
            last = "" if equals else flag
            name, known_names = flag[2:], [each[2:] for each in self.flags]
            if guess := did_you_mean(name, known_names, show="--{}".format, cutoff=MISSPELT):
                found = f"{flag} is not an option"
                raise self._error(self._did, found=found, fix=guess, field=name.replace("-", "_"))
            passed_on[name] = value if equals else True
        return dict(vars(known)), passed_on, tuple(words[end + 1 :])


def parse_pair(text: str) -> tuple[str, str]:
    """Return name and value of "NAME=VALUE"."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
