# SPDX-License-Identifier: Apache-2.0
"""fastai v2: a `Learner` of a notebook written for one process trains on all ranks of a session."""
