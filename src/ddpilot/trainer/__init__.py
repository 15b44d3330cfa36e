# SPDX-License-Identifier: Apache-2.0
"""`Trainer`, a complete training loop built on `Loop`, and its callbacks. Imports `launcher`, `training` and below."""
