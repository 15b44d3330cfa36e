# SPDX-License-Identifier: Apache-2.0
"""The site builds without a warning, its links lead somewhere, and its search finds pages by the words of users."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from py_mini_racer import MiniRacer

from ddpilot.findings.catalog import all_entries
from tests.unit.cli.test_explain_command import MESSAGES, PASTED

ROOT = Path(__file__).parents[1]


def load_script() -> ModuleType:
    """docs/build_site.py as a module."""
    spec = spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site: 20 seconds of CPU time, by far the most of this file."""
    folder = tmp_path_factory.mktemp("site")
    assert load_script().build(folder / "docs", folder / "source") == 0, "see the warnings above"
    return folder / "docs"


class Search:
    """The site's own search, run by a JavaScript engine without a page."""

    def __init__(self, site: Path) -> None:
        self.engine = MiniRacer()
        self.engine.eval(
            "var window = globalThis, localStorage = {setItem() {}};"
            "var document = {getElementById: () => ({children: []})};"
            "var DOCUMENTATION_OPTIONS = {FILE_SUFFIX: '.html', SHOW_SEARCH_SUMMARY: false};"
            "var SPHINX_HIGHLIGHT_ENABLED = false, _ready = () => {}, _ = text => text;"
        )
        for script in (
            "_static/language_data.js",
            "_static/searchtools.js",
            "_static/message_search.js",
            "searchindex.js",
        ):
            self.engine.eval((site / script).read_text(encoding="utf-8"))

    def find(self, words: str) -> list[str]:
        """Return the pages that the site's search lists for `words`, the best first."""
        found = self.engine.eval(
            f"JSON.stringify(Search._performSearch(...Search._parseQuery({json.dumps(words)})).map(each => each[0]))"
        )
        return list(dict.fromkeys(reversed(json.loads(str(found)))))


@pytest.fixture(scope="module")
def search(site: Path) -> Iterator[Search]:
    """The search of the built site."""
    search = Search(site)
    yield search
    search.engine.close()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("hang", "how_to/hang"),
        ("stuck", "how_to/hang"),
        ("NCCL timeout", "how_to/hang"),
        ("out of memory", "how_to/out_of_memory"),
        ("gradient accumulation", "how_to/gradient_accumulation"),
        ("resume", "how_to/checkpoints"),
        ("Jupyter", "how_to/jupyter"),
        ("Slurm", "how_to/slurm"),
        ("slow", "how_to/profile"),
        ("install", "install"),
        ("Expected to have finished reduction in the prior iteration", "errors/DDP308"),
        ("Expected to mark a variable ready only once", "errors/DDP311"),
        ("Watchdog caught collective operation timeout", "errors/DDP218"),
        ("Detected mismatch between collectives on ranks", "errors/DDP201"),
        ("CUDA out of memory", "how_to/out_of_memory"),
        ("Expected all tensors to be on the same device", "errors/DDP412"),
        ("Address already in use", "errors/DDP103"),
        ("ChildFailedError", "errors/DDP701"),
    ],
)
def test_search_leads_to_the_page(search: Search, words: str, page: str) -> None:
    """The page is among the first three that the site's search lists."""
    assert page in search.find(words)[:3]


@pytest.mark.timeout(240)
def test_search_finds_the_page_of_a_pasted_message(search: Search) -> None:
    """It is the first one, as with `ddpilot explain`, also if no page has all words of the message."""
    wrong = {
        message: found
        for message, code in {**MESSAGES, **PASTED}.items()
        if (found := search.find(message))[:1] != [f"errors/{code}"]
    }
    assert not wrong


def test_each_finding_is_a_page_whose_title_has_the_message(site: Path) -> None:
    """The title is what search engines show: the message that users paste, and the code."""
    for entry in all_entries():
        html = (site / "errors" / f"{entry.code}.html").read_text(encoding="utf-8")
        title = re.search(r"<title>(.*?)</title>", html, re.DOTALL)
        assert title is not None
        assert entry.code in title[1]
        words = re.findall(r"\w{4,}", entry.symptoms[0] if entry.symptoms else entry.title)
        assert [word for word in words if word not in title[1]] == []
