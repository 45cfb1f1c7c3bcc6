# The same verbs for a person and for CI. A fresh clone needs Python (3.10 or later), git and make; everything
# else goes into $(VENV), at the versions that constraints.txt pins. Setting up is a stamp file: it costs nothing
# until pyproject.toml or constraints.txt change.
#
#   make demo     sets up, then runs examples/quickstart.py: the main job on this machine
#   make test     sets up, then runs the tests         (make test ARGS="tests/wire -x" for a part)
#   make lint     ruff and the layers (import-linter)
#   make types    mypy, strict
#   make bench    beside direct Monarch, Ray Client and rsync (make bench ARGS=--docs for docs/benchmarks.md, --only sync)
#   make docs     builds the documentation into build/docs, warnings being errors
#   make lock     renews constraints.txt
#   make clean    removes what the other verbs made

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
# By the environment rather than -c, so that what builds the package is pinned too; newer pips want a name of its own.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip --disable-pip-version-check --quiet
SET_UP := $(VENV)/.set-up
PINNED := pyproject.toml constraints.txt

.PHONY: demo test lint types bench bench-in-venv docs lock clean setup
.DEFAULT_GOAL := test

demo: $(SET_UP)-demo
	$(BIN)/python examples/quickstart.py

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

types: setup
	$(BIN)/mypy

# Ray stays out of the venv that everything else runs in.
bench:
	$(MAKE) --no-print-directory VENV=$(VENV)-bench bench-in-venv

bench-in-venv: $(SET_UP)-bench
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(SET_UP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "documentation: build/docs/index.html"

lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip --quiet install uv
	build/lock/bin/uv pip compile pyproject.toml --universal --python-version 3.10 --all-extras --no-annotate \
		--upgrade --quiet --output-file constraints.txt

clean:
	rm -rf $(VENV) $(VENV)-bench build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

setup: $(SET_UP)-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "meshgate needs Python 3.10 or later; name one with make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(SET_UP)-demo: $(PINNED) | $(VENV)/bin/python
	$(PIP) install -e '.[gateway,worker]'
	@touch $@

$(SET_UP)-%: $(SET_UP)-demo
	$(PIP) install -e '.[$*]'
	@touch $@
