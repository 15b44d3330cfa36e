# SPDX-License-Identifier: Apache-2.0
"""The flight ring's file: layout, writer, reader, and the values read. Free of torch. Imports `environments`."""
