# SPDX-License-Identifier: Apache-2.0
"""Whether there is something to run."""

from __future__ import annotations

import os
import sys
import time
import zipfile
from pathlib import Path

import pytest

from ddpilot.errors import LaunchError
from ddpilot.launching.elastic.options import RunOptions, TargetKind
from ddpilot.launching.elastic.target import check_stream, check_target, prepare_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, a package and broken files."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "train.py": "x = 1\n",
        "setup.py": "",
        "broken.py": "def f(:\n    pass\n",
        "nul.py": "x = 1\0",
        "latin.py": "x = 'é'\n",
        "train_pkg/__init__.py": "raise RuntimeError('must not be imported')\n",
        "train_pkg/fit.py": "x = 1\n",
        "train_pkg/broken.py": "x = (\n",
        "train_pkg/sub/__init__.py": "",
        "train_pkg/sub/__main__.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    for name, member, text in (
        ("app.pyz", "__main__.py", "x = 1"),
        ("empty.zip", "train.py", "x = 1"),
        ("broken.pyz", "__main__.py", "x = ("),
        ("on_path.zip", "zipped.py", "x = 1"),
    ):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(member, text)
    monkeypatch.syspath_prepend(tmp_path / "on_path.zip")
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("script", "train.py"),
        ("module", "train"),
        ("module", "train_pkg.fit"),
        ("module", "train_pkg.sub"),
        ("module", "timeit"),
        ("program", "sh"),
        ("script", "train_pkg/sub"),
        ("script", "app.pyz"),
        ("module", "zipped"),
    ],
)
def test_check_target_is_content_and_imports_nothing(here: Path, kind: TargetKind, target: str) -> None:
    """What Python would run is let through; the package's own code has not run, and the path is as before."""
    before = list(sys.path)
    check_target(kind, target)
    assert sys.path == before
    assert "train_pkg" not in sys.modules


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [
        ("script", "trian.py", "no such file in {here}. Did you mean `train.py`?"),
        ("script", "nowhere/x.py", "The folder `nowhere` does not exist either"),
        ("script", "zzz.py", "Give the path of a script: this folder has broken.py, latin.py, nul.py, train.py"),
        ("script", "zzz", "has broken.py, latin.py, nul.py, train.py; for a module write `ddpilot run -m zzz`"),
        ("script", "fit.py", "Did you mean `train_pkg/fit.py`?"),
        ("script", "python3", "Leave out `python3`"),
        (
            "script",
            "train_pkg",
            "without a `__main__.py`. Give the path of a script: `train_pkg` has broken.py, fit.py",
        ),
        ("script", "empty.zip", "it is a zip file without a `__main__.py`. Add one, as `python -m zipapp` does"),
        ("script", "broken.pyz", 'File "broken.pyz/__main__.py", line 1'),
        ("script", "torch.distributed.run", "Leave out `torch.distributed.run`"),
        ("script", "broken.py", '  File "broken.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax'),
        ("script", "nul.py", "null bytes"),
        ("script", "latin.py", "(unicode error) 'utf-8' codec can't decode"),
        ("module", "train_pkg", "`train_pkg` is a package without a `__main__` module"),
        ("module", "train_pkg.nope.x", "`train_pkg.nope` was not found from {here}"),
        ("module", "no_such_module", "`no_such_module` was not found"),
        ("module", "train_pkg.broken", "SyntaxError: '(' was never closed"),
        ("module", "train.py", "Leave out -m, or write -m train"),
        ("module", "train_pkg/fit.py", "Leave out -m, or write -m train_pkg.fit"),
        ("module", "./train_pkg/fit", "that is a file, not a module. Leave out -m, or write -m train_pkg.fit"),
        ("module", "torch.distributed.launch", "that is a launcher too. Leave it out"),
        ("program", "no-such-program", "no such program"),
    ],
)
def test_check_target_says_what_is_wrong(here: Path, kind: TargetKind, target: str, said: str) -> None:
    """What was found there, with file, line and caret where Python stumbles, and what to do."""
    with pytest.raises(LaunchError) as caught:
        check_target(kind, target)
    assert said.format(here=here) in str(caught.value)


@pytest.mark.parametrize("target", ["app.pyz", "package"])
def test_check_target_looks_at_what_is_there_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """The same words in another working directory, or after the file was written again, as from a notebook."""
    for folder, names in (("a", ["__main__.py"]), ("b", ["x" * 5000, "__main__.py"]), ("c", ["other.py"])):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        write_program(Path(target), names)
        if folder == "c":
            with pytest.raises(LaunchError, match=r"without a `__main__\.py`"):
                check_target("script", target)
        else:
            check_target("script", target)
    write_program(Path(target), ["y" * 9000, "__main__.py"])
    check_target("script", target)


def write_program(path: Path, names: list[str]) -> None:
    """A zip file or a directory with these files; a long name is one of 100 characters and that much content."""
    if path.suffix == ".pyz":
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name[:100], f"x = 1  # {name}")
        return
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name[:100]).write_text("x = 1\n")


def test_check_target_finds_a_module_that_was_written_just_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though Python has looked into the folder before, in the same tick of the file system's clock."""
    monkeypatch.chdir(tmp_path)
    folder_ns = time.time_ns()
    os.utime(tmp_path, ns=(folder_ns, folder_ns))
    with pytest.raises(LaunchError, match="was not found"):
        check_target("module", "made_just_now")
    (tmp_path / "made_just_now.py").write_text("x = 1\n")
    os.utime(tmp_path, ns=(folder_ns, folder_ns))
    check_target("module", "made_just_now")


def test_check_target_leaves_a_pipe_unread(tmp_path: Path) -> None:
    """The rank finds all that was written into it, as under torchrun."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(fd, b"x = 1\n")
        check_target("script", str(pipe))
        assert os.read(fd, 100) == b"x = 1\n"
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("num_ranks", "max_restarts", "found"), [(2, 0, "and 2 ranks have to"), (1, 1, r"2 attempts \(--max-restarts\)")]
)
def test_check_stream_refuses_a_pipe_with_several_readers(
    tmp_path: Path, num_ranks: int, max_restarts: int, found: str
) -> None:
    """The second reader would run an empty script and succeed; a file may be read by all, and /dev/null too."""
    pipe, file = tmp_path / "pipe", tmp_path / "file.py"
    os.mkfifo(pipe)
    file.write_text("x = 1\n")
    with pytest.raises(LaunchError, match=found):
        check_stream(str(pipe), num_ranks, max_restarts)
    check_stream(str(pipe), 1, 0)
    check_stream(str(file), num_ranks, max_restarts)
    check_stream("/dev/null", num_ranks, max_restarts)


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A script that is there."""
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def test_prepare_run_refuses_a_log_dir_that_is_a_file(script: str) -> None:
    """The folder and the system's word."""
    with pytest.raises(LaunchError, match=r"making files in --log-dir .*train.py: FileExistsError: File exists. Give"):
        prepare_run(RunOptions(target=script, log_dir=Path(script)), {})


def test_prepare_run_makes_the_log_dir(script: str, tmp_path: Path) -> None:
    """It is there, and empty, once it has been looked at."""
    prepared = prepare_run(RunOptions(target=script, nproc_per_node=1, log_dir=tmp_path / "a" / "b"), {})
    assert prepared.endpoint is not None
    prepared.endpoint.close()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_prepare_run_says_nothing_before_an_error(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The notice about the missing GPU is not shown if the run does not start."""
    with pytest.raises(LaunchError, match="no address of node 0 is given"):
        prepare_run(RunOptions(target=script, nnodes=(2, 2)), {})
    assert capsys.readouterr().err == ""


def test_prepare_run_refuses_a_filter_for_local_ranks_that_are_not_there(script: str) -> None:
    """Nothing would be shown; local ranks count from 0."""
    with pytest.raises(LaunchError, match="reading --local-ranks-filter: 5, but the node has local ranks 0 to 1. Give"):
        prepare_run(RunOptions(target=script, nproc_per_node=2, shown_local_ranks=frozenset({5})), {})


def test_prepare_run_refuses_a_rendezvous_backend_that_torch_does_not_have(script: str) -> None:
    """Before anything starts, and with the name that was meant."""
    with pytest.raises(LaunchError, match="reading --rdzv-backend: 'c10b'. Did you mean c10d. Backends are static, c1"):
        prepare_run(RunOptions(target=script, nproc_per_node=1, rdzv_backend="c10b"), {})
