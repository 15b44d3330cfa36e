# SPDX-License-Identifier: Apache-2.0
"""How a pulled value is described."""

from __future__ import annotations

from fractions import Fraction

from ddpilot.magics.push_pull import _describe


def test_describe_names_a_class_and_the_type_of_anything_else() -> None:
    """The type of a class says nothing."""
    assert _describe(Fraction) == "the class Fraction"
    assert _describe(Fraction(1)) == "Fraction"
    assert _describe([1, 2]) == "list of 2"
