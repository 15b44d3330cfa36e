# SPDX-License-Identifier: Apache-2.0
"""Reading the fault handler's output."""

from __future__ import annotations

import os

from ddpilot.launching import crash

OWN = os.path.join(os.path.dirname(crash.__file__), "local", "rank.py")
REPORT = [
    "step 1",
    "Fatal Python error: Segmentation fault",
    "",
    "Current thread 0x00007f (most recent call first):",
    '  File "/project/net.py", line 12 in forward',
    '  File "/project/train.py", line 40 in train',
    f'  File "{OWN}", line 51 in _run',
    '  File "<string>", line 1 in <module>',
    "",
    "Extension modules: numpy._core, torch._C (total: 30)",
]


def test_find_crash_line_gives_the_innermost_line_of_the_crashed_thread() -> None:
    """The first frame of the stack is where Python was."""
    assert crash.find_crash_line(REPORT) == "/project/net.py:12 in forward"


def test_find_crash_line_passes_over_what_looks_on_between_torch_and_the_user() -> None:
    """The line of the user's that called torch, and not that of the function around torch's which notes it."""
    package = os.path.dirname(os.path.dirname(crash.__file__))
    probe = f'  File "{os.path.join(package, "guard", "probe.py")}", line 191 in wrapper'
    library = f'  File "{os.path.join(os.path.dirname(os.__file__), "json", "decoder.py")}", line 3 in decode'
    assert crash.find_crash_line([*REPORT[:4], library, probe, *REPORT[5:]]) == "/project/train.py:40 in train"
    assert crash.find_crash_line([*REPORT[:4], probe]) is not None


def test_find_crash_line_gives_none_without_a_stack() -> None:
    """Lines that only look like frames are not taken for a stack."""
    assert crash.find_crash_line(["nothing", '  File "/project/net.py", line 12 in forward']) is None
    assert crash.find_crash_line([]) is None


def test_tidy_lines_drops_the_launcher_and_the_list_of_modules() -> None:
    """What is left is the user's: printed lines, the signal, the user's frames."""
    assert crash.tidy_lines(REPORT) == tuple(REPORT[:6])


def test_tidy_lines_keeps_the_last_twenty() -> None:
    """A long output is cut at its beginning."""
    assert crash.tidy_lines(map(str, range(50))) == tuple(map(str, range(30, 50)))


def test_find_raised_line_gives_the_innermost_line_of_the_users() -> None:
    """Not that of torch, in which the error was raised, nor that of an error which led to this one."""
    library = os.path.join(os.path.dirname(os.__file__), "json", "decoder.py")
    traceback = (
        'Traceback (most recent call last):\n  File "/project/net.py", line 3, in load\n    open(path)\n'
        "FileNotFoundError: weights\n\nDuring handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "/project/train.py", line 40, in <module>\n    run(parse(text))\n'
        f'  File "{library}", line 51, in parse\n    raise ValueError\nValueError: bad\n'
    )
    assert crash.find_raised_line(traceback) == ("/project/train.py", 40, "<module>", "run(parse(text))")
    assert crash.find_raised_line("") is None
