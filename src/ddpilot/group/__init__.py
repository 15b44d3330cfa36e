# SPDX-License-Identifier: Apache-2.0
"""The process group of a job: enter, use, leave, rebuild and unblock it. Imports `environments`."""
