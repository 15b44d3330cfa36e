# SPDX-License-Identifier: Apache-2.0
"""Render a job script: text from `JobOptions` and a command, without side effects. The nodes need no ddpilot for it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from ddpilot.launching.rank_environment import EXIT_REQUEUE, FAILURE_FILE_VARIABLE
from ddpilot.slurm.options import JobOptions

_DIRECTIVES = (
    *("time", "gpus_per_node", "gpus_per_task", "gres", "cpus_per_task", "mem", "mem_per_cpu", "mem_per_gpu"),
    *("account", "partition", "qos", "constraint", "reservation", "nodelist", "exclude", "chdir", "error"),
    *("array", "dependency", "begin", "mail_type", "mail_user"),
)
"""Fields that are options of sbatch of the same name."""

_FIRST_PORT, _NUM_PORTS = 10_000, 20_000
"""Ports that MASTER_PORT is chosen from: below those that Linux gives to connections."""

_MEET = f"""\
# All ranks meet at the first node; the port comes from the job's number, so that jobs on one node do not collide.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$(({_FIRST_PORT} + SLURM_JOB_ID % {_NUM_PORTS}))
export MASTER_ADDR MASTER_PORT
"""

_INTERFACE = """\
  # gloo takes the interface of the host name, which on many nodes is loopback: take the one of the default route.
  while read -r name to _; do
    [ "$to" != 00000000 ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$name}"
  done </proc/net/route
"""

_RANK = """\
  export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
  export LOCAL_WORLD_SIZE="${SLURM_STEP_TASKS_PER_NODE%%[!0-9]*}" GROUP_RANK="$SLURM_NODEID"
  export GROUP_WORLD_SIZE="$SLURM_STEP_NUM_NODES"
"""

_NODE = '  export PET_NODE_RANK="$SLURM_NODEID"  # read as --node-rank\n'

_WAIT = f"""\
  trap : USR1 TERM  # Slurm signals this shell too; its child saves a checkpoint and exits with {EXIT_REQUEUE}
  "$@" && exit
  status=$?
  [ "$status" -ne {EXIT_REQUEUE} ] || sleep 5  # the others have saved too: let them exit before srun ends the step
  exit "$status"'"""

_RESTART = """\
# A task of an array is ARRAY_TASK: its SLURM_JOB_ID alone may name the whole array.
job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
# The output of all starts is in one file.
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || echo "job $job starts again on $SLURM_JOB_NODELIST" >&2
"""

_REQUEUE = f"""\
|| status=$?

# {EXIT_REQUEUE}: the ranks have saved and want to go on. If a rank failed and noted update and error, the job is tried
# once more, but not if it failed there with the same error before.
if [ "$status" -ne 0 ] && [ "$status" -ne {EXIT_REQUEUE} ]; then
  [ -s "${FAILURE_FILE_VARIABLE}" ] || exit "$status"
  if grep -qsFxf "${FAILURE_FILE_VARIABLE}" "${FAILURE_FILE_VARIABLE}.before"; then
    echo "not requeued: the same error came at the same update twice: $(head -n 1 "${FAILURE_FILE_VARIABLE}")" >&2
    exit "$status"
  fi
  cat "${FAILURE_FILE_VARIABLE}" >>"${FAILURE_FILE_VARIABLE}.before"
  rm "${FAILURE_FILE_VARIABLE}"
fi
if [ "$status" -ne 0 ]; then
  echo "exit code $status: job $job is requeued" >&2
  scontrol requeue "$job"  # which also ends this script
  sleep 60
fi
"""


def render_job_script(options: JobOptions, target: str, args: Sequence[str] = (), *, module: bool = False) -> str:
    """Return the text of a job script that runs `target` with `args` on all ranks.

    `target`: path of a Python script, or with `module` the name of a module.
    """
    blocks = [
        "\n".join(_head(options, target)),
        _RESTART if options.requeue else "",
        "\n".join(_environment(options)),
        _MEET if options.nodes > 1 or options.ranks_by == "python" else "",
        "\n".join(_threads(options)),
        "\n".join(_failure_file(options)),
        _launch(options, _command(options, target, args, module)),
    ]
    return "\n\n".join(block.rstrip("\n") for block in blocks if block) + "\n"


def _head(options: JobOptions, target: str) -> Iterator[str]:
    num = options.num_ranks_per_node
    yield "#!/bin/bash"
    yield f"# {_one_line(target)} on {_count(options.nodes * num, 'rank')}: {_count(options.nodes, 'node')} x {num}."
    needs = "needs ddpilot on the nodes" if options.ranks_by == "ddpilot" else "needs no ddpilot command on the nodes"
    yield f"# Made by `ddpilot slurm`, and {needs}: sbatch submits it."
    for name, value in _directives(options, target):
        yield f"#SBATCH --{name}" + (f"={_value(value)}" if value is not True else "")
    yield ""
    yield "set -e -o pipefail"


def _directives(options: JobOptions, target: str) -> Iterator[tuple[str, str | bool]]:
    name = re.sub(r"[\s/]", "-", PurePath(target).stem) or "job"
    yield "job-name", options.job_name or name
    yield "nodes", str(options.nodes)
    yield "ntasks-per-node", str(options.num_ranks_per_node if options.ranks_by == "python" else 1)
    for field in _DIRECTIVES:
        if (value := getattr(options, field)) is not None:
            yield field.replace("_", "-"), str(value)
    yield "output", options.output or ("slurm-%A_%a.out" if options.array else "slurm-%j.out")
    if options.exclusive:
        yield "exclusive", options.exclusive
    signal = options.signal or ("USR1@120" if options.requeue else None)
    if signal:
        yield "signal", signal
    if options.requeue:
        yield "requeue", True
        yield "open-mode", "append"
    for field, text in options.extra.items():
        if text is not False:
            yield field.replace("_", "-"), text


def _environment(options: JobOptions) -> Iterator[str]:
    if options.modules:
        yield f"module load {' '.join(map(_quote, options.modules))}"
    if options.conda:
        yield 'eval "$(conda shell.bash hook)"'
        yield f"conda activate {_quote(options.conda)}"
    if options.venv:
        yield f"export VIRTUAL_ENV={_quote(options.venv)}"
        yield 'export PATH="$VIRTUAL_ENV/bin:$PATH"'
        yield '[ -x "$VIRTUAL_ENV/bin/python" ] || { echo "no Python in $VIRTUAL_ENV on $(hostname)" >&2; exit 1; }'
    for name, value in options.env.items():
        yield f"export {name}={_quote(value)}"
    yield from options.setup


def _threads(options: JobOptions) -> Iterator[str]:
    if options.cpus_per_task is None:
        return
    per_rank = options.cpus_per_task // (1 if options.ranks_by == "python" else options.num_ranks_per_node)
    per_rank = max(1, per_rank)
    yield "# srun does not take over the number of cores from sbatch."
    yield 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
    cores = _count(per_rank, "core")
    yield f"# {cores} for each rank: as many threads, and workers of a DataLoader whose script reads NUM_WORKERS."
    yield f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{per_rank}}}" NUM_WORKERS="${{NUM_WORKERS:-{per_rank - 1}}}"'


def _failure_file(options: JobOptions) -> Iterator[str]:
    if options.requeue:
        yield "# Where a Loop or Trainer notes the update and the error if it fails."
        yield f'export {FAILURE_FILE_VARIABLE}="$PWD/slurm-$SLURM_JOB_ID.failure"'


def _command(options: JobOptions, target: str, args: Sequence[str], module: bool) -> list[str]:
    """The lines that start the ranks of a task, as they stand in the script: quoted, variables expanded there."""
    script = [*(["-m"] if module else []), *map(_quote, (target, *args))]
    num = options.num_ranks_per_node
    python = _quote(options.python)
    if options.ranks_by == "python":
        words = [python, "-u"]
    else:
        torchrun = ["torchrun"] if options.python == "python" else [python, "-m", "torch.distributed.run"]
        agent = torchrun if options.ranks_by == "torchrun" else [python, "-m", "ddpilot", "run"]
        words = [*agent, f"--nproc-per-node={num}"]
        if options.nodes > 1:
            meet = ['--master-addr="$MASTER_ADDR"', '--master-port="$MASTER_PORT"']
            words += [f"--nnodes={options.nodes}", *meet]
        elif options.ranks_by == "torchrun":
            words.append("--standalone")
    prefix = ["uv", "run"] if options.uv else []
    if options.container:
        nv = ["--nv"] if options.num_gpus_per_node else []
        prefix = ["apptainer", "exec", *nv, _quote(options.container)]
    starter = " ".join([*prefix, *words])
    return [f"{starter} {' '.join(script)}"] if options.ranks_by == "python" else [starter, " ".join(script)]


def _launch(options: JobOptions, command_lines: Sequence[str]) -> str:
    """The srun line, with what each task does before it starts Python."""
    srun = ["srun", "--kill-on-bad-exit=1"]
    if _num_tasks(options) > 1:
        srun.append("--label")
    if options.gpus_per_task:
        srun.append("--gpu-bind=none")
    if options.container_image:
        srun.append(f"--container-image={_quote(options.container_image)}")
    inner = ""
    if options.nodes > 1 and options.ranks_by != "ddpilot":
        inner += _INTERFACE
    if options.ranks_by == "python":
        inner += _RANK
    elif options.nodes > 1:
        inner += _NODE
    lines = [_comment(options)]
    lines += ["# Every rank sees all GPUs of its node and takes number LOCAL_RANK."] if options.gpus_per_task else []
    command = " \\\n  ".join(command_lines)
    if not inner and not options.requeue:
        return "\n".join([*lines, f"{' '.join(srun)} \\\n  {command}"])
    if options.requeue:
        lines.append("status=0")
    lines.append("# shellcheck disable=SC2016 # what is in quotes is for the shell of each task")
    tail = _WAIT if options.requeue else '  exec "$@"\''
    text = "\n".join([*lines, f"{' '.join(srun)} bash -c '", f"{inner}{tail} task \\", f"  {command}"])
    return f"{text} {_REQUEUE}" if options.requeue else text


def _comment(options: JobOptions) -> str:
    labels = ", whose number is in front of its lines" if _num_tasks(options) > 1 else ""
    if options.ranks_by == "python":
        return f"# One task per rank{labels}. If a rank fails, srun ends all of them."
    agent = "torchrun" if options.ranks_by == "torchrun" else "`ddpilot run`"
    return f"# One {agent} per node, which starts the ranks of its node. If one fails, srun ends all of them."


def _num_tasks(options: JobOptions) -> int:
    """Tasks that srun starts."""
    return options.nodes * (options.num_ranks_per_node if options.ranks_by == "python" else 1)


def _value(value: str | bool) -> str:
    """`value` as sbatch reads it in a #SBATCH line, where quotes work as in a shell."""
    text = str(value)
    return text if re.fullmatch(r"[^\s\"'#\\]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _quote(word: str) -> str:
    """`word` for the shell, in double quotes where it has an apostrophe alone."""
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
