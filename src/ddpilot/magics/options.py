# SPDX-License-Identifier: Apache-2.0
"""The options of `%ddp start`: the fields of `SessionOptions`, which also has their defaults, texts and checks."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any, get_args

from ddpilot.launching.options import Output
from ddpilot.magics.usage import MagicParser, parse_ranks, parse_variable
from ddpilot.session.options import SessionOptions
from ddpilot.watch.options import Action, WatchOptions

_FLAGS: Mapping[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "nproc_per_node": (("-n", "--nproc-per-node"), {"metavar": "N", "type": lambda n: int(n) if n.isdecimal() else n}),
    "gpus": (("--gpus",), {"metavar": "0,1", "type": parse_ranks}),
    "backend": (("--backend",), {}),
    "seed": (("--seed",), {"type": int}),
    "apps": (("--app",), {"metavar": "NAME", "action": "append"}),
    "env": (("--env",), {"metavar": "NAME=VALUE", "action": "append", "type": parse_variable}),
    "preload": (("--preload",), {"metavar": "MODULE", "action": "append"}),
    "respawn": (("--respawn",), {"action": "store_true"}),
    "keep_cache": (("--keep-cache",), {"action": "store_true"}),
    "verbose": (("--verbose",), {"action": "store_true"}),
    "output": (("--output",), {"choices": get_args(Output)}),
    "output_limit_bytes": (("--output-limit-bytes",), {"metavar": "BYTES", "type": int}),
    "watch": (("--no-watch",), {"action": "store_false"}),
    "guard": (("--no-guard",), {"action": "store_false"}),
    "on_finding": (("--on-finding",), {"choices": get_args(Action)}),
    "stall_warn_s": (("--stall-warn-s",), {"metavar": "S", "type": float}),
}
"""How each field is spelt on a line. A test asks for every field of `SessionOptions`."""

_SHAPES: Mapping[str, Any] = {"apps": tuple, "env": dict, "preload": tuple}


def add_options(parser: MagicParser) -> None:
    """Give `parser` an option for every field."""
    texts = _field_texts()
    for name, (flags, how) in _FLAGS.items():
        parser.add_argument(*flags, dest=name, help=texts[name].replace("%", "%%"), **how)


def to_arguments(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Session` and `SessionOptions`: what was typed and nothing else."""
    names = {field.name for field in dataclasses.fields(SessionOptions)}
    return {name: _SHAPES.get(name, lambda same: same)(value) for name, value in parsed.items() if name in names}


def describe_options(options: SessionOptions) -> str:
    """The line that starts a session with `options`: those that are not the defaults."""
    words = []
    for field in dataclasses.fields(SessionOptions):
        value, flag = getattr(options, field.name), _FLAGS[field.name][0][0]
        if value == getattr(SessionOptions(), field.name):
            continue
        if isinstance(value, bool):
            words.append(flag)
        elif field.name == "env":
            words += [f"{flag} {name}={text}" for name, text in value.items()]
        elif field.name == "gpus":
            words.append(f"{flag} {','.join(map(str, value))}")
        else:
            words += [f"{flag} {each}" for each in (value if isinstance(value, tuple) else (value,))]
    return " ".join(["%ddp start", *words])


def _field_texts() -> dict[str, str]:
    """The text below each field, without Markdown's quotes."""
    found = {}
    for owner in (WatchOptions, SessionOptions):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found
