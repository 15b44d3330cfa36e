# SPDX-License-Identifier: Apache-2.0
"""`JobOptions`: what a job asks Slurm for and how its ranks start, validated before sbatch, and a site's defaults."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ddpilot.errors import MISSPELT, SlurmError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Launcher = Literal["auto", "python", "torchrun", "ddpilot"]

_TIME = r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d(:\d\d)?)?|(?i:unlimited|infinite)"
_MEMORY = r"\d+(\.\d+)?[KMGT]?B?"
_GPUS = r"([A-Za-z][\w.-]*:)?[1-9]\d*"
_MAIL = "NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT(_[89]0|_50)?|ARRAY_TASKS"
_RANGE = r"\d+(-\d+(:[1-9]\d*)?)?"
_AFTER = r"(after|afterany|afterburstbuffer|aftercorr|afternotok|afterok)(:\d+(_\d+|_\*)?(\+\d+)?)+|singleton"
_PATTERNS: dict[str, tuple[str, str]] = {
    "time": (_TIME, "minutes, HH:MM:SS, D-HH or D-HH:MM:SS, such as 2:00:00"),
    "gpus_per_node": (_GPUS, "a number of GPUs, or TYPE:NUMBER such as a100:4"),
    "gpus_per_task": (_GPUS, "a number of GPUs, or TYPE:NUMBER such as a100:1"),
    "gres": (r"[\w./-]+(:[\w.-]+)*(,[\w./-]+(:[\w.-]+)*)*", "NAME:NUMBER or NAME:TYPE:NUMBER, such as gpu:4"),
    "mem": (_MEMORY, "a number with K, M, G or T (megabytes without), such as 64G; 0 is all of the node's"),
    "mem_per_cpu": (_MEMORY, "a number with K, M, G or T (megabytes without), such as 4G"),
    "mem_per_gpu": (_MEMORY, "a number with K, M, G or T (megabytes without), such as 60G"),
    "signal": (r"([BR]{1,2}:)?(SIG)?[A-Z]+[12]?(@\d+)?|([BR]{1,2}:)?\d+(@\d+)?", "NAME@SECONDS, such as USR1@120"),
    "array": (rf"{_RANGE}(,{_RANGE})*(%[1-9]\d*)?", "numbers and ranges, such as 0-7 or 1,3,5-9%2"),
    "dependency": (rf"({_AFTER})([,?]({_AFTER}))*", "KIND:JOBID, such as afterok:1234"),
    "mail_type": (rf"({_MAIL})(,({_MAIL}))*", "BEGIN, END, FAIL, REQUEUE or ALL, or several with commas"),
    "job_name": (r"[^\s/]+", "a name without blanks and slashes"),
    "exclusive": ("user|mcs", "true, user or mcs"),
}
"""Values that sbatch accepts for a field, as a pattern and in words. All other fields take any text of one line."""

ALTERNATIVES = (
    ("gpus_per_node", "gres"),
    ("mem", "mem_per_cpu", "mem_per_gpu"),
    ("venv", "conda", "uv", "container", "container_image"),
)
"""Fields of which one may be given: an argument replaces the others of a site's defaults."""

_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "text"),
    "str | None": ((str, type(None)), 'text, such as {name} = "..."'),
    "bool": (bool, "true or false"),
    "bool | str": ((bool, str), "true, user or mcs"),
    "tuple[str, ...]": (tuple, "a list of texts"),
    "Mapping[str, str]": (Mapping, "a table of texts by name"),
    "Mapping[str, str | bool]": (Mapping, "a table of texts by name, or true for an option without a value"),
}
"""By annotation of a field, the types of its values, and these in words. Counts are checked by themselves."""

_COUNTS = ("nodes", "nproc_per_node", "cpus_per_task")
_SIGNALS = ("ALRM", "CONT", "HUP", "INT", "KILL", "QUIT", "STOP", "TERM", "TSTP", "TTIN", "TTOU", "URG", "USR1", "USR2")
_SAVE_AT = ("USR1", "TERM", "10", "15")
"""Signals at which a Loop or Trainer saves, and which the job script passes on."""
_AGAINST_REQUEUE = {
    "no_requeue": (True, "Leave it out: a job that Slurm may not requeue does not resume"),
    "open_mode": ("truncate", "Leave it out: the output of a requeued job is appended"),
}
"""Options of sbatch, with the value, that contradict `requeue`."""
SUBSTITUTES = {
    "ntasks": "ranks are nodes x nproc_per_node: give those",
    "nproc": "the field is nproc_per_node",
    "gpus": "the field is gpus_per_node",
    "wrap": "the script is made here: give its commands in `setup`",
}


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job requests from Slurm, and how its ranks start.

    Fields are named as sbatch names its options. A field that is None is left to the site's default. Raises SlurmError,
    with the field's name, for a wrong value.
    """

    nodes: int = 1
    """Number of nodes."""

    nproc_per_node: int | None = None
    """Number of ranks on each node. None: one per GPU that `gpus_per_node` or `gres` requests, else 1."""

    launcher: Launcher = "auto"
    """What starts the ranks. "python": srun, one Python per rank; "torchrun", "ddpilot": one agent per node, torchrun
    or `ddpilot run`. "auto": "python" with one rank per node or with `requeue`, else "torchrun"."""

    python: str = "python"
    """The interpreter, on the nodes."""

    time: str | None = None
    """Time limit: minutes, HH:MM:SS or D-HH:MM:SS."""

    gpus_per_node: str | None = None
    """GPUs on each node: a number, or TYPE:NUMBER."""

    gpus_per_task: str | None = None
    """GPUs of each task, for sites that require it. A rank sees all GPUs of its node anyway."""

    gres: str | None = None
    """Generic resources of each node, such as "gpu:4": the older spelling of `gpus_per_node`."""

    cpus_per_task: int | None = None
    """Number of cores of each task. With launcher "python" a task is a rank; otherwise it is a node's agent with its
    ranks."""

    mem: str | None = None
    """Memory of each node, such as "64G"."""

    mem_per_cpu: str | None = None
    """Memory for each core, instead of `mem`."""

    mem_per_gpu: str | None = None
    """Memory for each GPU, instead of `mem`."""

    account: str | None = None
    """Account to charge."""

    partition: str | None = None
    """Partition, or several with commas."""

    qos: str | None = None
    """Quality of service."""

    constraint: str | None = None
    """Features that nodes must have, such as "a100&nvlink"."""

    reservation: str | None = None
    """Reservation to run in."""

    nodelist: str | None = None
    """Nodes to use."""

    exclude: str | None = None
    """Nodes not to use."""

    job_name: str | None = None
    """Name of the job. None: the script's name, without its suffix."""

    chdir: str | None = None
    """Folder to run in. None: the folder in which sbatch runs."""

    output: str | None = None
    """File for the output of all ranks. None: "slurm-%j.out", for arrays "slurm-%A_%a.out"."""

    error: str | None = None
    """File for standard error. None: the same file as `output`."""

    array: str | None = None
    """Numbers of the tasks of a job array, such as "0-7" or "0-7%2"."""

    dependency: str | None = None
    """Jobs to wait for, such as "afterok:1234"."""

    begin: str | None = None
    """Earliest start, such as "now+1hour"."""

    mail_type: str | None = None
    """Events to send mail about, such as "END,FAIL"."""

    mail_user: str | None = None
    """Address for mail."""

    signal: str | None = None
    """Signal before the time limit, such as "USR1@120". With `requeue`, None is USR1@120."""

    requeue: bool = False
    """Requeue the job after a preemption, after a lost node, and when its ranks exit with 75 after a checkpoint. Ranks
    of a `Loop` or `Trainer` do this at `signal`."""

    exclusive: bool | str = False
    """True: no other job on the nodes; "user": only jobs of the same user."""

    modules: tuple[str, ...] = ()
    """Modules to load, in order."""

    venv: str | None = None
    """Folder of a virtual environment on the nodes."""

    conda: str | None = None
    """Name or folder of a conda environment."""

    uv: bool = False
    """Run with `uv run`, in the project of the job's folder."""

    container: str | None = None
    """Image for `apptainer exec`; with `nv` if GPUs are asked for."""

    container_image: str | None = None
    """Image for srun's --container-image (Pyxis, or Slurm's own)."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to set."""

    setup: tuple[str, ...] = ()
    """Shell lines to run before the ranks start, passed unchanged."""

    extra: Mapping[str, str | bool] = field(default_factory=dict)
    """Further options of sbatch by name, passed through: a text, or True for an option without a value."""

    def __post_init__(self) -> None:
        for each in fields(self):
            self._check_type(each.name, str(each.type))
        for name in _COUNTS:
            self._check_count(name)
        for each in fields(self):
            self._check_text(each.name)
        if self.launcher not in get_args(Launcher):
            raise refusal("launcher", self.launcher, f"Give one of {', '.join(get_args(Launcher))}")
        if self.signal is not None and not self.signal_name.isdecimal() and self.signal_name not in _SIGNALS:
            raise refusal(
                "signal", self.signal, f"Slurm knows {', '.join(_SIGNALS)}, with @SECONDS before the time limit"
            )
        if self.requeue:
            self._check_requeue()
        for names in ALTERNATIVES:
            self._check_alternatives(*names)
        self._check_mappings()

    def _check_type(self, name: str, annotation: str) -> None:
        value = getattr(self, name)
        types, words = _TYPES.get(annotation, (object, ""))
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, tuple) else ()
        in_items = (str, bool) if "bool" in annotation else str
        if not isinstance(value, types) or not all(isinstance(item, in_items) for _, item in items):
            raise refusal(name, value, f"Give {words.format(name=name)}")

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise refusal(name, value, "Give a whole number of at least 1")

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        lines = value if isinstance(value, tuple) else (value,)
        for line in lines:
            if isinstance(line, str) and (not line.strip() or re.search(r"[\n\r\0]", line)):
                raise refusal(name, line, "Give text of one line, or leave it out")
        if not isinstance(value, str):
            return
        pattern, words = _PATTERNS.get(name, (".+", "text of one line"))
        if not re.fullmatch(pattern, value):
            raise refusal(name, value, f"Give {words}")

    def _check_requeue(self) -> None:
        beside = "requeue=True"
        if self.launcher == "torchrun":
            fix = 'torchrun turns the exit code 75 of its ranks into 1: leave `launcher` at "auto", or use "ddpilot"'
            raise refusal("launcher", "torchrun", fix, beside=beside)
        if self.signal is not None and self.signal_name not in _SAVE_AT:
            raise refusal(
                "signal", self.signal, "A Loop or Trainer saves at USR1 or TERM: give USR1@120", beside=beside
            )
        if self.signal is not None and "B" in self.signal.rpartition(":")[0]:
            fix = "With B: the signal reaches the job script and not its ranks, which have to save: give USR1@120"
            raise refusal("signal", self.signal, fix, beside=beside)
        for name, (value, fix) in _AGAINST_REQUEUE.items():
            if self.extra.get(name) == value:
                raise refusal(name, value, fix, beside=beside)

    def _check_alternatives(self, *names: str) -> None:
        given = [name for name in names if getattr(self, name)]
        if len(given) > 1:
            raise refusal(given[1], getattr(self, given[1]), "Leave out one of the two", beside=f"`{given[0]}`")

    def _check_mappings(self) -> None:
        for name, value in self.env.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", name) or re.search(r"[\n\0]", value):
                raise refusal("env", f"{name}={value}", "Give names of variables, and values of one line")
        known = [each.name for each in fields(self)]
        for name, text in self.extra.items():
            if name in SUBSTITUTES:
                raise refusal(name, text, SUBSTITUTES[name][0].upper() + SUBSTITUTES[name][1:])
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or (isinstance(text, str) and re.search(r"[\n\0]", text)):
                raise refusal(name, text, "Give the name of an option of sbatch, and a value of one line")
            if guess := did_you_mean(name, known, cutoff=MISSPELT):
                raise refusal(name, text, guess)

    @property
    def signal_name(self) -> str:
        """The name or number in `signal`, without SIG, prefix and time; "" if there is none."""
        return (self.signal or "").rpartition(":")[2].partition("@")[0].removeprefix("SIG")

    @property
    def num_gpus_per_node(self) -> int:
        """GPUs on each node; 0 if none are asked for."""
        for text in (self.gpus_per_node, *(self.gres or "").split(",")):
            if text and (text == self.gpus_per_node or text.partition(":")[0] == "gpu"):
                return int(number) if (number := text.rpartition(":")[2]).isdecimal() else 1
        return int((self.gpus_per_task or "0").rpartition(":")[2]) * (self.nproc_per_node or 1)

    @property
    def num_ranks_per_node(self) -> int:
        """Ranks on each node: `nproc_per_node`, or the number of GPUs, or 1."""
        return self.nproc_per_node or self.num_gpus_per_node or 1

    @property
    def ranks_by(self) -> Literal["python", "torchrun", "ddpilot"]:
        """`launcher`, with "auto" resolved."""
        if self.launcher != "auto":
            return self.launcher
        return "python" if self.requeue or self.num_ranks_per_node == 1 else "torchrun"


def refusal(name: str, value: object, fix: str, *, beside: str = "") -> SlurmError:
    """Return the error for a wrong value of a field."""
    found = f"`{name}` is {value!r}{f', with {beside}' if beside else ''}"
    return SlurmError("reading the options of the job", found=found, fix=fix, field=name)


def make_options(values: Mapping[str, Any]) -> JobOptions:
    """Return the options with these values; names that are not fields go to `extra`. Lists may stand for tuples."""
    known = {each.name for each in fields(JobOptions)}
    own: dict[str, Any] = {}
    given = values.get("extra", {})
    extra: Any = dict(given) if isinstance(given, Mapping) else given
    for name, value in values.items():
        name = name.replace("-", "_")
        if name not in known:
            if not isinstance(value, (str, bool, int, float)):
                raise refusal(name, value, "It is not a field of a job; an option of sbatch is a text, or true")
            extra[name] = value if isinstance(value, bool) else str(value)
        elif name != "extra":
            own[name] = _convert(name, value)
    return JobOptions(**own, extra=extra)


def _convert(name: str, value: Any) -> Any:
    """`value` as the type of its field: numbers and times of day (02:00:00 in TOML) are texts, lists are tuples."""
    if name == "modules" and isinstance(value, str):
        return tuple(value.replace(",", " ").split())
    if name == "setup" and isinstance(value, str):
        return (value,)
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_text, value))
    if isinstance(value, Mapping):
        return {each: _as_text(text) for each, text in value.items()}
    return value if name in _COUNTS else _as_text(value)


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, (int, float, datetime.time)) and not isinstance(value, bool) else value


FILE = ".ddpilot.toml"
_TABLES = {FILE: ("slurm",), "pyproject.toml": ("tool", "ddpilot", "slurm")}


def find_defaults(folder: Path, home: Path) -> tuple[dict[str, Any], Path | None]:
    """Return the defaults that hold in `folder`, and the file that they are from; an empty dict and None without one.

    The nearest folder upwards whose .ddpilot.toml or pyproject.toml has the table counts, then `home`. Raises
    SlurmError if a file cannot be read.
    """
    for each in dict.fromkeys((folder, *folder.parents, home)):
        for name, keys in _TABLES.items():
            if (path := each / name).is_file() and (table := _read_table(path, keys)) is not None:
                return table, path
    return {}, None


def options_with_defaults(given: Mapping[str, Any], folder: Path, home: Path) -> JobOptions:
    """Return the options in `given`, and for fields that are not in it those of `find_defaults`.

    Raises SlurmError, with the field and the file, for a wrong value.
    """
    defaults, path = find_defaults(folder, home)
    try:
        make_options(defaults)
    except SlurmError as error:
        did = f"reading the defaults of jobs in {path}"
        raise SlurmError(did, found=error.found, fix=error.fix, field=error.field) from None
    own = _as_fields(given)
    replaced = {name for names in ALTERNATIVES if own.keys() & set(names) for name in names}
    return make_options({**{k: v for k, v in _as_fields(defaults).items() if k not in replaced}, **own})


def _as_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in values.items()}


def _read_table(path: Path, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """The table at `keys` in a TOML file; None if it is not there."""
    try:
        table: Any = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SlurmError(f"reading {path}", found=str(error), fix="Correct the file") from error
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    if table is not None and not isinstance(table, dict):
        raise SlurmError(f"reading {path}", found=f"{'.'.join(keys)} is {table!r}", fix="Make it a table")
    return table
