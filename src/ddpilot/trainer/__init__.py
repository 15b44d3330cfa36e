# SPDX-License-Identifier: Apache-2.0
"""`Trainer`: the loop written for you, made of `Loop`; and the callbacks that look on."""
