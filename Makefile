# draftmill's front door. Everything happens in .venv; the system's Python is left alone.
#   make install | demo [ARGS=--small] | test | test-fast | fuzz | check | format | bench-env | lock |
#   wheel | clean

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PY := .venv/bin/python
ARGS ?=
export PYTHON
# Some machines forbid bytecode files; then every start compiles torch and vLLM again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test test-fast fuzz check format bench-env lock wheel clean distclean

help:
	@echo 'make install      builds .venv with everything; the command is .venv/bin/draftmill'
	@echo 'make demo         installs, then runs the whole job on a small model (ARGS=--small: shorter)'
	@echo 'make test         installs, checks, and runs every test, real vLLM servers included'
	@echo 'make test-fast    installs, and runs the tests that are quick and need no vLLM server'
	@echo 'make fuzz         installs, and reads hostile bytes for a minute'
	@echo 'make check        lint, format, types, import contract'
	@echo 'make format       puts the sources into the house format'
	@echo 'make bench-env    builds .venv-bench with the peers that draftmill bench shards measures'
	@echo 'make lock         resolves requirements/cpu.lock and bench.lock again'
	@echo 'make wheel        builds dist/draftmill-*.whl'
	@echo 'make clean        removes caches and build output; make distclean removes .venv and .venv-bench too'
	@echo 'PYTHON=python3.12 chooses another interpreter; uv is used where it is on the PATH'

install: .venv/.linked

# Two stamps, so that a change of setup.cfg costs a second and only a new lock installs again.
.venv/.installed: requirements/cpu.lock requirements/install.sh
	sh requirements/install.sh .venv cpu
	@touch $@

.venv/.linked: .venv/.installed setup.cfg requirements/develop.py
	$(PY) requirements/develop.py
	@touch $@

demo: install
	.venv/bin/draftmill demo $(ARGS)

# The servers of the e2e tests need the whole machine: they run alone, and last.
test: check
	$(PY) -m pytest -m 'not e2e' -n 2 $(ARGS)
	$(PY) -m tests.fuzz --seconds 60
	$(PY) -m pytest -m e2e $(ARGS)

test-fast: install
	$(PY) -m pytest -m 'not e2e and not slow' -n 2 $(ARGS)

# Hostile bytes for what is read from disk; a failure prints the command that repeats it.
fuzz: install
	$(PY) -m tests.fuzz --seconds 60

# mypy reads the rooms through the links in .venv; the messages should name the real files.
check: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy | sed 's#^\.venv/dev/draftmill/##'
	.venv/bin/lint-imports

format: install
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# zipnn is compiled: it needs a C compiler.
bench-env: .venv-bench/.installed

.venv-bench/.installed: requirements/bench.lock requirements/install.sh
	sh requirements/install.sh .venv-bench bench
	@touch $@

lock:
	sh requirements/lock.sh

wheel: install
	rm -rf build draftmill.egg-info
	$(PY) -m build --wheel --no-isolation --outdir dist
	rm -rf build draftmill.egg-info

clean:
	rm -rf build dist draftmill.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path './.venv*' -prune -o -path ./.git -prune -o -name __pycache__ -type d -print0 \
	    | xargs -0 rm -rf

distclean: clean
	rm -rf .venv .venv-bench
