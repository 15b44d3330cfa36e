# SPDX-License-Identifier: Apache-2.0
"""The checks of `ddpilot gpu-check`, by subject; each runs in a separate process. Imports every floor below."""
