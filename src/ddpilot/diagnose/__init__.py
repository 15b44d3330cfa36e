# SPDX-License-Identifier: Apache-2.0
"""Commands that check a machine, an installation or a program before a job runs. May import everything but the CLI."""
