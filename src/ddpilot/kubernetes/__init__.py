# SPDX-License-Identifier: Apache-2.0
"""Render manifests for Kubernetes: a script as a PyTorchJob or a JobSet. Imports only `errors`; no torch."""
