# SPDX-License-Identifier: Apache-2.0
"""Speed at several numbers of ranks: what is lost, and a model that predicts others. Imports `pictures`; no torch."""
