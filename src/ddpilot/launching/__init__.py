# SPDX-License-Identifier: Apache-2.0
"""Start ranks and supervise them. Imports `output`, `group`, `environments` and `findings`; torch only in ranks."""
