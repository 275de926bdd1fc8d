# Each target is the only command a fresh machine needs: it installs what is missing first.
SHELL := /bin/bash
BIN := .venv/bin
ARGS ?=
# Tests run in two processes; those that share an engine stay together (tests/conftest.py).
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
# Every process of the demo and of the tests imports the same large packages: let the first cache them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-fast test-long test-clients first-hour lint format types docs clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo:  ## Watch a small model get better through every real part (ARGS="--seed 1" passes flags)
	@.ci/install.sh examples,trainer
	@$(BIN)/atropos-demo $(ARGS)

test: lint types  ## Lint, types and the tests, those with a real engine included
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-fast:  ## The files that take less than two seconds each: no engine, no browser, few processes
	@.ci/install.sh all,dev
	$(BIN)/python -m pytest $(WORKERS) --fast -m "not slow" $(ARGS)

test-long:  ## What takes minutes each: thousands of histories, kill loops, every constant answer
	@.ci/install.sh all,dev
	$(BIN)/python -m pytest $(WORKERS) --run-long -m long $(ARGS)

test-clients:  ## Third-party agents and trainers, each installed for itself (docs/clients.md)
	@.ci/install.sh all,dev
	$(BIN)/python -m pytest tests/clients tests/environments/test_earlier_files.py --run-clients $(ARGS)

first-hour:  ## Run every code block of README and docs in a fresh clone, as a newcomer would
	@.ci/install.sh all,dev
	$(BIN)/python -m tests.first_hour $(ARGS)

lint:  ## Formatting, lint, spelling and secrets, as in pre-commit
	@.ci/install.sh all,dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell $$(git ls-files '*.py' '*.md' '*.toml' '*.yaml' '*.yml')
	$(BIN)/detect-secrets-hook $$(git ls-files '*.py' '*.md' '*.toml' '*.yaml' '*.yml' '*.sh')

types:  ## Static types, as in pre-commit
	@.ci/install.sh all,dev
	$(BIN)/mypy

format:  ## Format and fix what can be fixed
	@.ci/install.sh all,dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs:  ## Rewrite the generated pages
	@.ci/install.sh all,dev
	$(BIN)/python -m atroposlib.envs.config_docs > CONFIG.md
	@$(BIN)/python -m environments.card_table
	$(BIN)/python -m tests.clients.table > docs/clients.md

clean:  ## Remove what the targets made
	rm -rf .venv demo_runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
