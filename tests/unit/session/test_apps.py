# SPDX-License-Identifier: Apache-2.0
"""Apps are found by their entry points; errors name what is wrong with one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddpilot.errors import LaunchError
from ddpilot.session.apps import App, find_app, present_modules


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A third-party package with three apps: a good one, one without its library, one that is not an app."""
    (tmp_path / "otherapps.py").write_text(
        "from ddpilot.session.apps import App\n"
        "GOOD = App(name='good', preload=('json', 'nosuchpackage.part'))\n"
        "BARE = App(name='bare', libraries=('nosuchpackage', 'northis'), install='other[bare]')\n"
        "WRONG = 'a string'\n"
    )
    info = tmp_path / "otherapps-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: otherapps\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ddpilot.apps]\ngood = otherapps:GOOD\nbare = otherapps:BARE\nwrong = otherapps:WRONG\n"
        "gone = otherapps:GONE\nbroken = nosuchmodule:APP\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "otherapps", raising=False)
    return "otherapps"


def test_find_app_finds_what_ddpilot_ships() -> None:
    """Both shipped apps are there under their names."""
    assert find_app("fastai").name == "fastai"
    assert find_app("lightning").libraries == ("lightning", "pytorch_lightning")


def test_find_app_finds_apps_of_other_packages(other_package: str) -> None:
    """A library author needs an entry point and nothing else."""
    app = find_app("good")
    assert isinstance(app, App)
    assert app.name == "good"


def test_find_app_lists_the_known_ones_when_the_name_is_unknown() -> None:
    """The error names what could have been meant."""
    with pytest.raises(LaunchError, match="no app of that name is installed. Installed are: .*fastai, .*lightning"):
        find_app("fastia")


def test_find_app_says_what_to_install_when_the_library_is_missing(other_package: str) -> None:
    """The error names the extra."""
    with pytest.raises(LaunchError) as raised:
        find_app("bare")
    assert "`nosuchpackage` or `northis` is not installed" in str(raised.value)
    assert 'pip install "other[bare]"' in raised.value.fix


@pytest.mark.parametrize(
    ("name", "found"),
    [("wrong", "is of type str"), ("gone", "cannot be loaded: .*GONE"), ("broken", "cannot be loaded: .*nosuchmodule")],
)
def test_find_app_names_the_entry_point_when_it_is_broken(other_package: str, name: str, found: str) -> None:
    """An app that cannot be used is blamed by its entry point."""
    with pytest.raises(LaunchError, match=found):
        find_app(name)


def test_present_modules_leaves_out_what_is_not_installed() -> None:
    """A library that is there in part is preloaded in part."""
    assert present_modules(App(name="a", preload=("json", "nosuchpackage.part"))) == ("json",)
