# SPDX-License-Identifier: Apache-2.0
"""What tests that start ranks from their own process need before the first of them."""

from tests.dist.conftest import a_store_was_made

__all__ = ["a_store_was_made"]
