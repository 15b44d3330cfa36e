# SPDX-License-Identifier: Apache-2.0
"""fastai v2: a `Learner` written for one process trains on all ranks of a session. Imports `session` and below."""
