SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-slow lint
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME

ready := .venv/.installed
# Two workers on two cores: one thread each.
workers := OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2

help:
	@echo 'make demo       set up .venv if needed, then train a tiny model with GRPO on the CPU'
	@echo 'make test       set up .venv if needed, then run the tests that need no GPU, without the slow ones'
	@echo 'make test-fast  the same, without those that start ranks, a server, Ray or another program'
	@echo 'make test-slow  set up .venv if needed, then run the slow tests that need no GPU'
	@echo 'make setup      only set up .venv'
	@echo 'make lint       check style, format and types (.pre-commit-config.yaml)'

setup: $(ready)

$(ready): requirements.txt requirements-peers.txt constraints.txt pyproject.toml scripts/setup.sh \
  $(wildcard scripts/sglang_wheel/*)
	@scripts/setup.sh

demo: $(ready)
	@scripts/run_demo.sh

test: $(ready)
	@$(workers)

test-fast: $(ready)
	@$(workers) -m 'not slow and not real'

test-slow: $(ready)
	@.venv/bin/python -m pytest -m slow

lint: $(ready)
	@.venv/bin/pre-commit run --all-files
