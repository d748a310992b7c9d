# One target for each thing a person does. Needs only python3 and make; everything else goes into .venv.
#   make demo     train a small GPT in half its memory, side by side with plain training
#   make test     run the tests that need nothing else; ARGS="tests/graph -x" for a part
#   make test-all run the slow tests too: those that need other libraries, a compiler or more time
#   make lint     ruff and mypy
#   make format   let ruff rewrite the sources
#   make dist     build dist/*.whl and dist/*.tar.gz, and check what a registry would show of them
#   make docs     refresh the output and the picture that docs/graphs.md shows
#   make site     build the documentation into site/, with warnings as errors
#   make bench    list the benchmarks; make bench-NAME ARGS="..." runs benchmarks/NAME.py
#   make clean    remove .venv and everything made by tools

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
WARM := $(VENV)/warm
ZOO := $(VENV)/zoo
SITE := $(VENV)/site
RELEASE := $(VENV)/release
COMPILED := $(shell find rematch -name '*kernels.py')

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format dist docs site bench clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(WARM)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("rematch needs Python 3.10 or newer: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[plot,dev]'
	@touch $@

# Compiled code is cached beside its source; warming it here keeps the first solve of a user fast.
$(WARM): $(INSTALLED) $(COMPILED)
	$(BIN)/python -m rematch.warmup
	@touch $@

demo: setup
	@$(BIN)/rematch demo

test: setup
	@$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

test-all: setup
	@REMATCH_TESTS=all $(BIN)/python -m pytest -n 2 --dist loadgroup -m '' $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist: $(RELEASE)
	rm -rf dist
	$(BIN)/python -m build --no-isolation .
	$(BIN)/python -m twine check --strict dist/*

$(RELEASE): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[release]'
	@touch $@

docs: setup
	@$(BIN)/python docs/refresh.py

site: $(SITE)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo 'site/index.html; python3 -m http.server -d site shows it with search'

$(SITE): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	@touch $@

bench:
	@for file in $$(grep -l __main__ benchmarks/[a-z]*.py); do \
		printf 'make bench-%-16s %s\n' "$$(basename $$file .py | tr _ -)" "$$(sed -n '1s/^"""//p' $$file)"; \
	done

bench-%: setup
	@$(BIN)/python benchmarks/$(subst -,_,$*).py $(ARGS)

# The zoo trains models of libraries that nothing else needs.
$(ZOO): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[zoo]'
	@touch $@

bench-zoo: $(ZOO)

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
