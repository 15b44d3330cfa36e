# SPDX-License-Identifier: Apache-2.0
"""`python -m pictures [NAME ...]`: draw the pictures of docs/pictures anew, or those that are named."""

from __future__ import annotations

import argparse

from pictures import curves, diagram, notebooks, reports, terminals

DRAWN_BY = {
    "notebooks": notebooks.draw,
    "same_losses": curves.draw_same_losses,
    "resume": curves.draw_resume,
    "reports": reports.draw,
    "missing_node": terminals.draw,
    "processes": diagram.draw,
}


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m pictures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DRAWN_BY)} (all)")
    names = parser.parse_args().names or list(DRAWN_BY)
    if unknown := [name for name in names if name not in DRAWN_BY]:
        parser.error(f"no such picture: {', '.join(unknown)}; there are {', '.join(DRAWN_BY)}")
    for name in names:
        print(f"drawing {name}", flush=True)
        DRAWN_BY[name]()


if __name__ == "__main__":
    main()
