# SPDX-License-Identifier: Apache-2.0
"""The sequence that shows itself."""

from __future__ import annotations

import pytest

from ddpilot.findings.as_html import render_html
from ddpilot.findings.as_text import render_text
from ddpilot.findings.display import Findings
from tests.unit.findings.samples import DESYNC, HOSTILE, SMALL_BATCH


def test_findings_are_a_sequence_in_the_given_order() -> None:
    """Length, index, slice, iteration, membership and equality are those of a tuple."""
    findings = Findings(iter([DESYNC, SMALL_BATCH]))
    assert len(findings) == 2
    assert findings[0] is DESYNC
    assert findings[-1] is SMALL_BATCH
    assert list(findings) == [DESYNC, SMALL_BATCH]
    assert findings[1:] == Findings([SMALL_BATCH])
    assert HOSTILE not in findings
    assert not Findings()
    with pytest.raises(IndexError):
        findings[2]


def test_findings_show_themselves_everywhere() -> None:
    """HTML in a notebook, the text report in IPython and print, codes inside of other values."""
    from IPython.core.formatters import PlainTextFormatter

    findings = Findings([DESYNC, SMALL_BATCH])
    assert findings._repr_html_() == render_html(findings)
    assert str(findings) == PlainTextFormatter()(findings) == render_text(findings)
    assert repr([findings]) == "[Findings(DDP201, DDP305)]"
