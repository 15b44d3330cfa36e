# SPDX-License-Identifier: Apache-2.0
"""Logs of a training: values of all ranks, and the files and services they go to. Imports `async_scalars` only."""
