# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx for the source that docs/build_site.py writes: `make docs`."""

from __future__ import annotations

import posixpath
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

project = "ddpilot"
author = "the authors of ddpilot"
release = version = version_of("ddpilot")

extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["conf.py"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4  # of headings, spelled as GitHub does
nb_execution_mode = "off"  # the tests run what is shown, and the notebooks are stored with their outputs
nb_render_markdown_format = "myst"
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
copybutton_remove_prompts = True

html_theme = "furo"
html_title = f"ddpilot {release}"
html_show_copyright = False
html_copy_source = False
html_last_updated_fmt = None  # the same source gives the same pages
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))
html_static_path = ["_static"]
html_js_files = [("message_search.js", {"defer": "defer"})]  # after searchtools.js, before the query is run
html_permalinks_icon = "#"
pygments_style = "default"
pygments_dark_style = "github-dark"


_menus: dict[tuple[str, str], str] = {}


def share_menu(app: Any, page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Make the menu once for all pages of a folder that are not in it: Sphinx resolves all its links again for each."""
    if "orphan" not in app.env.metadata.get(page, {}):
        return
    make = context["toctree"]

    def menu(**options: Any) -> str:
        key = (posixpath.dirname(page), repr(sorted(options.items())))
        if key not in _menus:
            _menus[key] = make(**options)
        return _menus[key]

    context["toctree"] = menu


def setup(app: Any) -> None:
    """Connect `share_menu` before the theme reads the menu."""
    app.connect("html-page-context", share_menu, priority=100)
