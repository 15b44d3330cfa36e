# SPDX-License-Identifier: Apache-2.0
"""What `Loop` does: prepare, pass over data, step. Imports every other package of `training`."""
