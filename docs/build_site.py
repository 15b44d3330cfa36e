# SPDX-License-Identifier: Apache-2.0
"""Build the site from the Markdown of this repository: `python docs/build_site.py`, or `make docs`.

The pages are what GitHub shows. This script copies them to a folder, writes a page for each finding and each linked
file of the source, moves links to where the pages are, and calls Sphinx. A warning of Sphinx is an error.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ddpilot.findings.catalog import Entry, all_entries

DOCS = Path(__file__).parent
ROOT = DOCS.parent
OUT = ROOT / "out"
FINDINGS = "src/ddpilot/findings/pages"
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "internals/contributing.md",
    "CHANGELOG.md": "reference/changelog.md",
    "SECURITY.md": "explanation/security.md",
}
"""Pages of the repository that are not in docs, and their places on the site."""
NOTEBOOKS = ("examples/quickstart.ipynb", "examples/interactive.ipynb", "examples/library/train.ipynb")
ORPHAN = "---\norphan: true\n---\n\n"
"""Marks a page that is not in the menu. With the findings in it, the menus would be most of the site."""
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".yaml": "yaml"}

_FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_SECTION = re.compile(r"^## (?P<title>.+)\n(?P<text>(?:(?!## ).*\n)*)", re.MULTILINE)
_PICTURE = re.compile(
    r'<picture>\s*<source media="[^"]*dark[^"]*" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)">\s*</picture>'
)
_IMAGE = "```{{image}} {path}\n:alt: {alt}\n:class: only-{scheme}\n```\n"
_SCRIPT = re.compile(r"<script\b[^>]*>(?!</script>).*?(?=</script>)", re.DOTALL)
_TAG = re.compile(r"<[a-zA-Z][^<>]*>")
_ATTRIBUTE = re.compile(r'\s(id|href|src)="([^"]*)"')
_CODE = re.compile(r"(?<![\w`\[/#.])(DDP\d{3})(?![\w`\]])")


UNSEARCHED = ("docs/decisions/", "docs/internals/", "CONTRIBUTING.md", "CHANGELOG.md")
"""For contributors, or of the past: the search leaves these pages out."""


def stage(source: Path) -> None:
    """Write the source of the site into the new folder `source`."""
    pages = {path: _read(path) for path in _markdown()}
    pages |= {f"{FINDINGS}/{entry.code}.md": render_finding(entry) for entry in all_entries()}
    for path, text in pages.items():
        moved = "".join(_relink(part, path, source) if is_prose else part for part, is_prose in _parts(text))
        moved = _PICTURE.sub(_as_images, moved)
        head = "---\nnosearch: true\n---\n\n" if path.startswith(UNSEARCHED) else ""
        _write(source / place_of(path), head + moved)
    for path in NOTEBOOKS:
        notebook = json.loads(_read(path))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = _relink("".join(cell["source"]), path, source)
        _write(source / place_of(path), json.dumps(notebook))
    for path in (found for found in _files() if not found.endswith((".md", ".py"))):
        (source / place_of(path)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, source / place_of(path))
    shutil.copyfile(DOCS / "conf.py", source / "conf.py")
    _write(source / "_static" / "message_search.js", render_message_search())
    index = source / "index.md"
    _write(index, index.read_text(encoding="utf-8") + render_toctrees(source))


def place_of(path: str) -> str:
    """Return the place on the site of a page or file of the repository, both relative, with `/`."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith(f"{FINDINGS}/"):
        return path.replace(FINDINGS, "errors")
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return path if path.endswith(".ipynb") else f"source/{path}.md"


def render_finding(entry: Entry) -> str:
    """Return the page of a finding. Its title has the first message, which is what users paste into a search."""
    message = entry.symptoms[0].rstrip(".") if entry.symptoms else ""
    quote = "``" if "`" in message else "`"
    title = f"{quote}{message}{quote}: {entry.title}" if message else entry.title
    body = entry.text.partition("\n")[2]
    body = re.sub(r"^severity: (\w+)$", r"Finding `" + f"{entry.code} {entry.name}" + r"`, \1.", body, flags=re.M)
    body = re.sub(r"^(general: .*)\n", "", body, flags=re.M)
    body = re.sub(r"^- (https?://\S+)$", r"- <\1>", body, flags=re.M)
    known = {each.code for each in all_entries()} - {entry.code}
    linked = "".join(
        _CODE.sub(lambda code: f"[{code[1]}]({code[1]}.md)" if code[1] in known else code[1], part)
        if is_prose
        else part
        for part, is_prose in _parts(body)
    )
    return f"{ORPHAN}# {title} ({entry.code})\n{linked.rstrip()}\n\nIn a terminal: `ddpilot explain {entry.code}`.\n"


def render_message_search() -> str:
    """Return the script that lets the site's search find the page of a message, with the symptoms of all findings."""
    messages = [[f"errors/{entry.code}", entry.is_general, entry.symptoms] for entry in all_entries() if entry.symptoms]
    return f"const MESSAGES = {json.dumps(messages)};\n{_read('docs/message_search.js')}"


def _as_images(picture: re.Match[str]) -> str:
    """The two images of a `<picture>`, of which the site shows the one for its scheme, as a reader may choose it."""
    return "".join(_IMAGE.format(path=picture[each], alt=picture["alt"], scheme=each) for each in ("light", "dark"))


def render_toctrees(source: Path) -> str:
    """Return a table of contents, which Sphinx hides, for each section of the index, from the links in it.

    A page that the index does not name stands at the end of the last section that has a page of its folder.
    """
    sections = {each["title"]: list(_targets(each["text"])) for each in _SECTION.finditer(_read("docs/index.md"))}
    named = {name for names in sections.values() for name in names}
    lists = {title: names for title, names in sections.items() if names}
    for name in sorted(path.relative_to(source).as_posix() for path in source.rglob("*")):
        folder = posixpath.dirname(name)
        is_listed = name.endswith((".md", ".ipynb")) and folder not in ("errors", "reference")
        if is_listed and name != "index.md" and name not in named and not name.startswith("source/"):
            homes = [title for title, names in lists.items() if folder in map(posixpath.dirname, names)]
            lists.setdefault(homes[-1] if homes else "More", []).append(name)
    reference = source / "reference/index.md"
    text = reference.read_text(encoding="utf-8")
    pages = dict.fromkeys(path for path, _ in _LINK.findall(text) if "/" not in path)
    _write(reference, text + _toctree(list(pages), ""))
    return "".join(_toctree(names, title) for title, names in lists.items())


def _toctree(names: Sequence[str], caption: str) -> str:
    options = f":caption: {caption}\n" if caption else ""
    return "\n```{toctree}\n:hidden:\n" + options + "\n" + "".join(f"{name}\n" for name in names) + "```\n"


def _targets(text: str) -> Iterator[str]:
    for path, _ in _LINK.findall(text):
        yield place_of(posixpath.normpath(posixpath.join("docs", path)))


def _relink(text: str, page: str, source: Path) -> str:
    """Return the prose `text` of `page` with links to the places of their targets on the site."""

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[1]))
        if (ROOT / path).is_dir():
            path = f"{path}/index.md" if (ROOT / path / "index.md").exists() else "CONTRIBUTING.md"
        place = place_of(path)
        if place.startswith("source/"):
            _write_listing(source / place, path)
        return posixpath.relpath(place, posixpath.dirname(place_of(page)) or ".") + (link[2] or "")

    return _LINK.sub(moved, text)


def _write_listing(page: Path, path: str) -> None:
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    _write(page, f"---\norphan: true\nnosearch: true\n---\n\n# {path}\n\n````{language}\n{_read(path)}````\n")


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a page, and whether each is prose: the others are fences."""
    start = 0
    for fence in _FENCE.finditer(text):
        yield text[start : fence.start()], True
        yield fence[0], False
        start = fence.end()
    yield text[start:], True


def _markdown() -> list[str]:
    return [*(path for path in ELSEWHERE if path != "README.md"), *(path for path in _files() if path.endswith(".md"))]


def _files() -> list[str]:
    files = (path for path in DOCS.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


class _Page:
    """The ids of a page, and what it links to."""

    def __init__(self, path: Path) -> None:
        tags = "".join(_TAG.findall(_SCRIPT.sub("", path.read_text(encoding="utf-8"))))
        attributes = [(name, html.unescape(value)) for name, value in _ATTRIBUTE.findall(tags) if value]
        self.ids = {value for name, value in attributes if name == "id"}
        self.links = [value for name, value in attributes if name != "id"]


def find_broken_links(site: Path) -> list[str]:
    """Return `page: link` for each link inside the site that leads to no file, or to no id in it."""
    pages = {path: _Page(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            has_id = not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].ids
            if not target.exists() or not has_id:
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def build(site: Path, source: Path, *, num_jobs: int = 1) -> int:
    """Build the site into `site`, with its source in `source`; both are replaced. Return the exit status."""
    from sphinx.cmd.build import main as sphinx_build

    for folder in (site, source):
        shutil.rmtree(folder, ignore_errors=True)
    stage(source)
    options = ["-q", "-n", "-W", "--keep-going", "-j", str(num_jobs), "-d", str(source / ".doctrees")]
    status = sphinx_build([*options, "-b", "html", str(source), str(site)])
    broken = find_broken_links(site)
    for link in broken:
        sys.stderr.write(f"broken link: {link}\n")
    return status or int(bool(broken))


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site and print where it is; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT / "docs")
    parser.add_argument("--source", type=Path, default=OUT / "docs-source")
    given = parser.parse_args(argv)
    status = build(given.out, given.source, num_jobs=os.cpu_count() or 1)
    sys.stdout.write(f"{len(list(given.out.rglob('*.html')))} pages: {given.out / 'index.html'}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
