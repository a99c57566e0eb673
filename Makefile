# Three commands, the same for people and machines: make test, make check, make fix. `make demo` shows what it is all for.
# Each sets up what it needs in .venv first, from the exact versions of requirements.lock, and is quick the second time.

VENV ?= .venv
CLIENTS ?= .venv-clients
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest
# Most tests keep one processor busy. A file's tests stay together: they share engines, and compiling is what takes long.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup weights demo test test-slow test-clients test-browser test-accelerator test-latest check fix lock clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## set up .venv (the others do it by themselves)

$(READY): requirements.lock pyproject.toml
	@python=$$(.ci/find-python 3.11)
	echo "setting up $(VENV) with $$($$python --version): this takes a minute, once" >&2
	[ -x $(BIN)/python ] || $$python -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

weights: $(READY) ## download SmolLM2 into the cache folder
	@$(BIN)/jaxkv fetch smollm2

demo: weights ## eight chats through a pool that is too small, live
	@$(BIN)/jaxkv demo configs/quickstart.yaml

test: $(READY) ## the tests; those on real weights are skipped where SmolLM2 cannot be downloaded
	@$(BIN)/jaxkv fetch smollm2 || echo "going on without SmolLM2: tests on real weights will be skipped" >&2
	$(PYTEST) $(PARALLEL) -m "not slow and not accelerator and not clients"

test-slow: weights ## the tests that take minutes
	@$(PYTEST) -m "slow and not accelerator and not clients"

test-clients: weights ## other people's clients against the server, each in an environment of its own (a GB of disk; 7 with HEAVY=1, for guidellm)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint requirements.lock --no-build-isolation --editable '.[clients]'
	for client in 'lm_eval lm-eval[api]==0.4.13' 'llm llm==0.36' 'aiperf aiperf==0.13.0' $(if $(HEAVY),'guidellm guidellm==0.8.1'); do
	  read -r name package <<< "$$client"
	  [ -x $(CLIENTS)/$$name/bin/$$name ] && continue
	  $(BIN)/python -m venv $(CLIENTS)/$$name
	  $(CLIENTS)/$$name/bin/python -m pip install -qq --disable-pip-version-check "$$package"
	done
	JAXKV_CLIENTS=$(CLIENTS) $(PYTEST) tests/clients -m clients

test-browser: $(READY) ## the tests of the web page (needs Chromium and its chromedriver)
	@$(PYTEST) -m browser

test-accelerator: $(READY) ## the exactness tests on a GPU or TPU (needs one of the extras cuda12, cuda13, tpu)
	@JAXKV_ACCELERATOR=1 $(PYTEST) tests/accelerator -m accelerator

test-latest: ## the tests with Python 3.12 and the newest JAX that pyproject allows
	@python=$$(.ci/find-python 3.12)
	[ -x .venv-latest/bin/python ] || $$python -m venv .venv-latest
	.venv-latest/bin/python -m pip install -qq --disable-pip-version-check --upgrade --upgrade-strategy eager --editable '.[dev,server]'
	.venv-latest/bin/python -m pip list --disable-pip-version-check | grep -iE '^(jax|jaxlib|flax|numpy|orbax-checkpoint) '
	.venv-latest/bin/python -m pytest $(PARALLEL) -m "not slow and not accelerator and not clients"

check: $(READY) ## formatting, lint, types, import direction, and the package as a user gets it
	@$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python .ci/check_package.py

fix: $(READY) ## format, and mend what lint can mend
	@$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lock: $(READY) ## write requirements.lock anew from the ranges in pyproject.toml
	@$(BIN)/pip-compile --quiet --extra dev --extra server --allow-unsafe --strip-extras --no-header --no-annotate --no-emit-index-url \
	  --no-emit-find-links --no-emit-trusted-host --upgrade --output-file requirements.lock pyproject.toml

clean: ## remove everything that setting up and testing left
	@rm -rf .venv .venv-latest .venv-clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
