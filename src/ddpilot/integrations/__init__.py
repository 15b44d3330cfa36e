# SPDX-License-Identifier: Apache-2.0
"""Adapters of training libraries to ddpilot's ranks, one package per library. Imports `launcher` and below."""
