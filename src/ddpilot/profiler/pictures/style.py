# SPDX-License-Identifier: Apache-2.0
"""Colors, labels and style sheet of the pictures: readable on white and on black, with any kind of color blindness."""

from __future__ import annotations

COLORS = {
    "data": "#e69f00",
    "copy": "#a6761d",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "waiting": "#c7c7c7",
    "communication": "#d55e00",
    "optimizer": "#009e73",
    "checkpoint": "#cc79a7",
    "evaluation": "#f0e442",
    "sync": "#b2abd2",
    "shadow": "#4d4d4d",
    "other": "#8a8a8a",
}
"""By share of an update: the palette of Okabe and Ito, whose colors also differ in lightness, and two greys."""
UNKNOWN = "#8a8a8a"
"""Color of a share that has none."""
WHITE_TEXT = frozenset({"forward", "shadow"})
"""Shares on which white text is readable; on all others black is."""
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#a6761d")
"""Colors of lines, one for each rank."""
LATE = "#d55e00"
"""The color of lateness: the stronger, the later."""
LEGEND = {
    "data": "waiting for a DataLoader",
    "copy": "copying data to the device",
    "forward": "forward pass",
    "backward": "backward pass",
    "waiting": "in a collective, until the last rank comes",
    "communication": "in a collective, after that",
    "optimizer": "the optimizer's step",
    "checkpoint": "writing a checkpoint",
    "evaluation": "forward passes without gradients",
    "sync": "reading values of tensors, waiting for a device",
    "shadow": "without batches, matching the collectives of the others (Join)",
    "other": "code between these",
}
"""Description of each share in a few words."""
OVERLAPPED = "communication while backward computes, in parallel: not in the sum"
"""Description of overlapped communication, which is not a share of an update."""

# A label that has no room in its bar wraps behind the zero-width space before it, and the second line is hidden.
# Neither text nor lines have a color of their own, and nothing but bars a background: a notebook's theme decides.
STYLE = """
.ddpilot-profile { line-height: 1.45; max-width: 1000px; }
.ddpilot-profile h2 { font-size: 1.15em; line-height: 1.3; margin: 1.7em 0 .3em; }
.ddpilot-profile p { margin: .3em 0 .6em; max-width: 75ch; }
.ddpilot-profile .note { opacity: .8; font-size: .92em; }
.ddpilot-profile figure { margin: 0; padding: 0; }
.ddpilot-profile ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: .2em 0 .8em;
  padding: 0; font-size: .92em; }
.ddpilot-profile ul.legend li { margin: 0; white-space: nowrap; }
.ddpilot-profile .key { display: inline-block; width: .85em; height: .85em; margin-right: .4em; vertical-align: -.08em;
  box-shadow: inset 0 0 0 1px rgba(128, 128, 128, .55); }
.ddpilot-profile .key.line { height: 3px; vertical-align: .25em; width: 1.4em; box-shadow: none; }
.ddpilot-profile .rows { display: grid; grid-template-columns: max-content minmax(0, 1fr) max-content; gap: 4px 10px;
  align-items: center; }
.ddpilot-profile .rows > .name { white-space: nowrap; font-size: .92em; }
.ddpilot-profile .chart > .x { font-size: .85em; text-align: right; padding-top: 3px; }
.ddpilot-profile .rows > .total { white-space: nowrap; font-size: .92em; font-variant-numeric: tabular-nums; }
.ddpilot-profile .bar { display: flex; height: 26px; overflow: hidden; }
.ddpilot-profile .bar > span { flex: none; box-sizing: border-box; overflow: hidden; color: #000; font-size: 12px;
  line-height: 26px; text-align: center; border-right: 1px solid rgba(255, 255, 255, .6); }
.ddpilot-profile .track { position: relative; height: 26px; overflow: hidden; }
.ddpilot-profile .track > span { position: absolute; top: 0; bottom: 0; min-width: 1px; box-sizing: border-box;
  overflow: hidden; font-size: 12px; line-height: 26px; color: #000; text-align: center; }
.ddpilot-profile .bar > span, .ddpilot-profile .track > span { white-space: normal; overflow-wrap: normal;
  word-break: normal; }
.ddpilot-profile .bar > span::before, .ddpilot-profile .track > span::before { content: "\\200b"; }
.ddpilot-profile .track > .label { pointer-events: none; }
.ddpilot-profile .white { color: #fff !important; }
.ddpilot-profile .waiting { background-image: repeating-linear-gradient(135deg, rgba(0, 0, 0, .28) 0 1px,
  transparent 1px 6px); }
.ddpilot-profile .thin, .ddpilot-profile .thin .track { height: 8px; }
.ddpilot-profile .overlapped { background-image: repeating-linear-gradient(45deg, rgba(255, 255, 255, .6) 0 2px,
  transparent 2px 5px); }
.ddpilot-profile .axis { position: relative; height: 1.5em; font-size: .85em; border-top: 1px solid
  rgba(128, 128, 128, .6); }
.ddpilot-profile .axis > span { position: absolute; transform: translateX(-50%); white-space: nowrap; top: 2px; }
.ddpilot-profile .axis > span.first { transform: none; }
.ddpilot-profile .axis > span.last { transform: translateX(-100%); }
.ddpilot-profile svg { display: block; width: 100%; overflow: visible; }
.ddpilot-profile .heat svg { height: 100%; overflow: hidden; }
.ddpilot-profile .heat .track { box-shadow: inset 0 0 0 1px rgba(128, 128, 128, .3); }
.ddpilot-profile .dense { gap: 1px 10px; }
.ddpilot-profile .dense > .name, .ddpilot-profile .dense > .total { font-size: 11px; line-height: 13px; }
.ddpilot-profile .dense .bar, .ddpilot-profile .dense .track { height: 13px; }
.ddpilot-profile .dense .bar > span, .ddpilot-profile .dense .track > span { font-size: 0; }
.ddpilot-profile .together { white-space: nowrap; display: inline-block; }
.ddpilot-profile .scale { display: inline-block; width: 8em; height: .8em; margin: 0 .5em; vertical-align: -.05em;
  background: linear-gradient(90deg, transparent, LATE); box-shadow: inset 0 0 0 1px rgba(128, 128, 128, .55); }
.ddpilot-profile .chart { display: grid; grid-template-columns: max-content minmax(0, 1fr); column-gap: 8px; }
.ddpilot-profile .chart .y { position: relative; height: 150px; font-size: .85em; min-width: 4.6em; }
.ddpilot-profile .chart .y > span { position: absolute; right: 0; transform: translateY(50%); white-space: nowrap; }
.ddpilot-profile .chart .plot { position: relative; height: 150px; }
.ddpilot-profile .chart.tall .y, .ddpilot-profile .chart.tall .plot { height: 260px; }
.ddpilot-profile .chart svg { height: 100%; }
.ddpilot-profile .dot { position: absolute; width: 10px; height: 10px; margin: 0 0 -5px -5px; border-radius: 50%; }
.ddpilot-profile .spread { position: absolute; width: 2px; margin-left: -1px; }
.ddpilot-profile .wide { overflow-x: auto; }
.ddpilot-profile table { border-collapse: collapse; font-size: .92em; font-variant-numeric: tabular-nums; }
.ddpilot-profile th, .ddpilot-profile td { padding: 2px 12px 2px 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid rgba(128, 128, 128, .3); font-weight: normal; background: none; }
.ddpilot-profile th:first-child { text-align: left; }
.ddpilot-profile thead th, .ddpilot-profile tfoot th, .ddpilot-profile tfoot td { font-weight: 600; }
""".replace("LATE", LATE)

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.45 system-ui, sans-serif; margin: 24px auto; padding: 0 16px; max-width: 1000px;
  background: #fff; color: #1b1b1b; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5em; line-height: 1.25; margin: 0 0 .3em; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16181c; color: #e8e8e8; }} a {{ color: #8ab4f8; }} }}
</style></head><body><main>
<h1>{title}</h1>
{body}
</main></body></html>
"""


def color_of(name: str) -> str:
    """Return the color of a share."""
    return COLORS.get(name, UNKNOWN)
