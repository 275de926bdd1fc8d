# Each target first installs what is missing, so that it works in a fresh clone.
SHELL := /bin/bash
BIN := .venv/bin
ARGS ?=
# Engine of the demo; torch: installed without vLLM.
ENGINE ?=
# Tests run in two processes; tests that share an engine run in the same one (tests/conftest.py).
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
# With COVERAGE=1, tests record which lines run, and `make figures-table` prints the sums.
PYTEST := $(BIN)/$(if $(COVERAGE),coverage run -m,python -m) pytest
SLOW_TESTS_OF_PURE_RULES := tests/server_handling/test_tool_formats.py \
	tests/server_handling/test_tagged_tool_formats.py tests/wire/test_properties.py \
	tests/trainer/weights/test_publishing.py tests/trainer/weights/test_following.py
COVERAGE_TABLE := $(BIN)/coverage combine --quiet && \
	$(BIN)/coverage json --quiet -o build/coverage/figures.json && \
	$(BIN)/python -m helpers.coverage_figures build/coverage/figures.json
# Processes of the demo and the tests import the same large packages; the first one caches their bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-fast test-long test-clients test-adapters first-hour figures figures-all figures-table mutants lint format types docs site clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo:  ## Train a small model with every component (ARGS="--seed 1" passes flags; ENGINE=torch: no vLLM)
	@ENGINE=$(ENGINE) .ci/install.sh examples,trainer
	@$(BIN)/atropos-demo $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

test: lint types  ## Lint, types and tests, including those with a real engine
	$(PYTEST) $(WORKERS) $(ARGS)

test-fast:  ## Only files that take less than two seconds: no engine, no browser, few processes
	@.ci/install.sh all,dev
	$(BIN)/python -m pytest $(WORKERS) --fast -m "not slow" $(ARGS)

test-long:  ## Tests that take minutes: thousands of histories, kill loops, every constant answer
	@.ci/install.sh all,dev
	$(PYTEST) $(WORKERS) --run-long -m long $(ARGS)

test-clients:  ## Third-party agents and trainers, each in its own environment (docs/clients.md)
	@.ci/install.sh all,dev
	$(BIN)/python -m pytest tests/clients tests/environments/test_earlier_files.py --run-clients $(ARGS)

test-adapters:  ## Environments of other libraries, each with its installed package (docs/adapters)
	@.ci/install.sh all,dev
	$(PYTEST) tests/adapters --run-clients $(ARGS)

first-hour:  ## Run every code block of README and docs in a fresh clone, as a newcomer would
	@.ci/install.sh all,dev
	$(BIN)/python -m tests.first_hour $(ARGS)

figures:  ## Coverage of atroposlib by lines and of the pure rules by branches (build/coverage)
	@.ci/install.sh all,dev
	@$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(WORKERS) --fast -m "not slow" -q $(ARGS)
	$(BIN)/coverage run -m pytest $(WORKERS) -q $(SLOW_TESTS_OF_PURE_RULES)
	@$(COVERAGE_TABLE)

figures-all:  ## The same with every test, those of other libraries' environments included (more than an hour)
	@.ci/install.sh all,dev
	@$(BIN)/coverage erase
	@# The table is printed even if a test fails, which is shown above it.
	-$(BIN)/coverage run -m pytest $(WORKERS) -q $(ARGS)
	-$(BIN)/coverage run -m pytest tests/adapters/test_own_environments.py --run-clients -q
	@$(COVERAGE_TABLE)

figures-table:  ## The same of the targets that ran with COVERAGE=1
	@$(COVERAGE_TABLE)

mutants:  ## Change the pure rules in small ways: which changes does no test notice? (ARGS="loss --sample 0")
	@.ci/install.sh all,dev
	@$(BIN)/python -m helpers.mutants $(ARGS)

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

docs:  ## Regenerate the generated pages
	@.ci/install.sh all,dev
	@$(BIN)/python -m helpers.config_page > CONFIG.md
	@$(BIN)/python -m environments.card_table
	$(BIN)/python -m tests.clients.table > docs/clients.md

site:  ## Build the documentation site to build/site; links and anchors are checked
	@.ci/install.sh all,dev
	@$(BIN)/python -m helpers.site_pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## Remove the files created by the targets
	rm -rf .venv demo_runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
