# SPDX-License-Identifier: Apache-2.0
"""The pictures of README and docs, made from real runs by `make pictures`; imports ddpilot and tests.browser."""
