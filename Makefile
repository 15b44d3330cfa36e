# SPDX-License-Identifier: Apache-2.0
# Every verb does its own set-up: Python 3.10+ and make are all a fresh machine needs.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BROWSER_READY := $(VENV)/.browser-ready
BENCH_READY := $(VENV)/.bench-ready
DIST_READY := $(VENV)/.dist-ready
# What `make dist` tries, such as PAIRS="3.11:newest 3.12:lowest"; empty: Python 3.10 to 3.13, each with both.
PAIRS :=
PYTEST := $(BIN)/python -m pytest
# `make setup EXTRAS=dev,browser` installs at once what `make test-browser` would add.
EXTRAS := dev
# pip compiles all files on one core; what cannot be compiled is some package's example of that, and what hardly any
# process imports is left out. Ours too: hundreds of processes of the tests import it, and where PYTHONDONTWRITEBYTECODE is
# set each would compile it anew.
NEVER_IMPORTED := /(tests|fontTools|grpc|moto|mypyc?|onnxscript|pip|setuptools|transformers/models|websockets)/
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(NEVER_IMPORTED)' $(VENV)/lib src || true
# What has changed since: ranks import modules of the tests too. The rest are programs of which tests list the folders.
COMPILE_CHANGED := $(BIN)/python -m compileall -qq -j 0 -x '/(cases|controls|corpus|fixable|fixtures)/' \
	src tests benchmarks examples || true

# Four files at a time keep two cores busy, since tests also wait. Those that take longest come first, and small ones
# last, so that no core is idle while another is in the last of them; a folder that is new comes in between.
FIRST := tests/accelerator tests/notebook $(addprefix tests/dist/,nodes integrations diagnose) tests/test_docs.py \
	tests/zoo $(addprefix tests/dist/,training run test_examples.py test_random_cells.py projects watch launching session)
NOT_IN_TEST := tests/slurm tests/browser
EACH := $(filter-out tests/dist tests/unit $(NOT_IN_TEST),$(patsubst %/,%,$(wildcard tests/*/))) $(wildcard tests/test_*.py) \
	$(patsubst %/,%,$(wildcard tests/dist/*/)) $(wildcard tests/dist/test_*.py)
BY_FILE := --dist loadfile --no-loadscope-reorder
# These wait for Slurm and ssh most of their time; those that take longest come first.
LONGEST_ON_NODES := $(addprefix tests/slurm/test_,sites.py requeue.py session.py) \
	$(addprefix tests/dist/nodes/test_session_,hosts.py cells.py) $(addprefix tests/slurm/test_,follow.py watch.py)
ON_NODES := $(LONGEST_ON_NODES) $(filter-out $(LONGEST_ON_NODES),$(wildcard tests/slurm/test_*.py))

# The first interpreter that is new enough and can make a virtual environment. `make PYTHON=/path/to/python` overrides.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 \
	&& { command -v $$python; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo pictures test test-slurm test-browser soak zoo gpu-check check prose bench notebooks docs reference dist clean

help: ## list the verbs
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(READY) ## make .venv and install everything that constraints.txt pins

$(READY): pyproject.toml constraints.txt
	@python="$(PYTHON)"; if [ -z "$$python" ]; then \
		echo "make: looked for python3, python3.13 ... python3.10 and found none that is 3.10 or newer and has venv." >&2; \
		echo "      Install one (Debian and Ubuntu: apt install python3-venv), or say which: make PYTHON=/path/to/python" >&2; \
		exit 1; fi; \
	if [ ! -x $(BIN)/python ]; then echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV); fi
	$(INSTALL) --upgrade pip
	$(INSTALL) -e '.[$(EXTRAS)]'
	@$(COMPILE)
	@touch $(READY) $(if $(findstring browser,$(EXTRAS)),$(BROWSER_READY))

demo: $(READY) ## run the quickstart notebook in a real Jupyter kernel, 2 ranks, and say where its plots are
	$(BIN)/python examples/run_quickstart.py

pictures: $(BROWSER_READY) ## draw docs/pictures anew, from real runs and a real browser; NAMES="hang resume" for some
	$(BIN)/python -m tests.browser.chromium
	$(BIN)/python -m pictures $(NAMES)

test: $(READY) ## every test, with a seeded part of the soak
	@$(COMPILE_CHANGED)
	$(PYTEST) -n 4 $(BY_FILE) $(addprefix --ignore=,$(ON_NODES)) $(FIRST) \
		$(filter-out $(FIRST) %/__pycache__,$(EACH)) tests/unit

test-slurm: $(READY) ## jobs and sessions on a real Slurm and over ssh, which it installs (as root, on Debian or Ubuntu)
	@$(COMPILE_CHANGED)
	$(BIN)/python -m tests.slurm.install
	$(PYTEST) -n 3 $(BY_FILE) $(ON_NODES)

test-browser: $(BROWSER_READY) ## notebooks run by clicks in JupyterLab and Chromium, which it installs; pictures in out/browser
	$(BIN)/python -m tests.browser.chromium
	rm -rf out/browser
	$(PYTEST) tests/browser -m browser -n 2 $(BY_FILE)

$(BROWSER_READY): $(READY)
	$(INSTALL) -e '.[dev,browser]'
	@$(COMPILE)
	@touch $(BROWSER_READY)

soak: $(BENCH_READY) ## the long, randomised versions
	@$(COMPILE_CHANGED)
	DDPILOT_SOAK=1 $(PYTEST) -m soak -o faulthandler_timeout=21000

zoo: $(READY) ## run every program of the failure zoo without and with ddpilot, print the table, write docs/internals/zoo.md
	$(BIN)/python -m tests.zoo.table

gpu-check: $(READY) ## check the claims about GPUs on this machine, and write ddpilot-gpu-check.json; NAMES="one two" for some
	$(BIN)/ddpilot gpu-check $(NAMES)

dist: $(DIST_READY) ## build sdist and wheel, check them, and try the wheel in fresh environments; PAIRS="3.11:newest" for some
	$(BIN)/python -m tools.check_dist $(PAIRS)

$(DIST_READY): $(READY)
	$(INSTALL) -e '.[dev,dist]'
	@$(COMPILE)
	@touch $(DIST_READY)

check: $(READY) ## lint, strict types, import floors, prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.check_prose

prose: $(READY) ## list the sentences of README and docs that read as translated, are too long, or use words without an entry
	$(BIN)/python -m tools.check_prose --list

bench: $(BENCH_READY) ## measure every bar against its peer, on this machine
	$(BIN)/python -m benchmarks

$(BENCH_READY): $(READY)
	$(INSTALL) -e '.[dev,bench]'
	@$(COMPILE)
	@touch $(BENCH_READY)

notebooks: $(READY) ## run the notebooks of examples in a real kernel and store their outputs in them
	$(BIN)/python -m tests.notebook.stored

docs: $(READY) ## build the site into out/docs, without a warning, with its links checked
	$(BIN)/python docs/build_site.py

reference: $(READY) ## write docs/reference and the map in CONTRIBUTING.md from docstrings, and other generated pages from their sources
	$(BIN)/python docs/render_reference.py
	$(BIN)/python docs/render_rooms.py
	$(BIN)/python docs/render_findings.py
	$(BIN)/python docs/render_lint.py
	$(BIN)/python docs/render_gpus.py

clean: ## remove what the verbs made
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
