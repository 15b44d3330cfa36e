# SPDX-License-Identifier: Apache-2.0
"""The speed of a program at several numbers of ranks: what is lost, and a model that predicts other numbers."""
