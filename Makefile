# The same targets for people and for CI. A fresh clone needs Python (3.10 or later), git and make; everything else is
# installed into $(VENV) at the versions in constraints.txt. The set-up is a stamp file, so it costs nothing until
# pyproject.toml or constraints.txt change.
#
#   make demo     sets up, then runs examples/quickstart.py on this machine
#   make test     sets up, then runs the tests (some of them: make test ARGS="tests/wire -x";
#                 with the newest pre-release of Monarch, in a venv of its own: make test MONARCH=nightly)
#   make torch    adds torch, which tests/end_to_end/test_torch.py needs; they are skipped without it
#   make lint     ruff, the layers (import-linter) and plain English (tests/lint/plain_english.py)
#   make types    mypy, strict
#   make bench    measures against direct Monarch, Ray Client and rsync (ARGS=--docs: docs/benchmarks.md; ARGS="--only sync")
#   make conformance  compares behavior with direct Monarch, case by case (some: make conformance ARGS="errors ports";
#                 Monarch's own tests of a source tree or wheel: make conformance ARGS="--upstream DIR")
#   make chaos    injects random faults for an hour and counts what they cost (shorter: make chaos ARGS="--minutes 5";
#                 in one process on a virtual clock: make chaos ARGS=--simulate)
#   make mutate   plants small defects in the risky parts and counts those that tests find (ARGS="sessions store")
#   make docs     builds the documentation into build/docs; warnings are errors
#   make lock     updates constraints.txt
#   make clean    removes the files that the other targets created

PYTHON ?= python3
MONARCH =
VENV ?= .venv$(and $(MONARCH),-$(MONARCH))
ARGS ?=
BIN := $(VENV)/bin
# The environment, unlike -c, also pins the build dependencies; newer versions of pip use a separate variable for those.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip --disable-pip-version-check --quiet
SET_UP := $(VENV)/.set-up
PINNED := pyproject.toml constraints.txt

.PHONY: demo test torch lint types bench bench-in-venv conformance chaos mutate docs lock clean setup
.DEFAULT_GOAL := test

demo: $(SET_UP)-demo
	$(BIN)/python examples/quickstart.py

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/lint/plain_english.py

types: setup
	$(BIN)/mypy

# Any build of torch will do. On Linux, PyPI has the one for CUDA alone, which is large; the one for CPUs is on another
# index: make torch PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
torch: setup
	@$(PIP) install 'torch==2.13.0' || { echo "torch 2.13.0 could not be installed: name an index that has it in \
	PIP_INDEX_URL or PIP_EXTRA_INDEX_URL. make test leaves out the tests that need torch without it" >&2; exit 1; }

# Ray has a venv of its own.
bench:
	$(MAKE) --no-print-directory VENV=$(VENV)-bench bench-in-venv

bench-in-venv: $(SET_UP)-bench
	$(BIN)/python -m benchmarks $(ARGS)

conformance: setup
	$(BIN)/python -m tests.conformance $(ARGS)

chaos: setup
	$(BIN)/python -m tests.chaos $(ARGS)

mutate: setup
	$(BIN)/python -m tests.mutation $(ARGS)

docs: $(SET_UP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "documentation: build/docs/index.html"

lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip --quiet install uv
	build/lock/bin/uv pip compile pyproject.toml --universal --python-version 3.10 --all-extras --no-annotate \
		--upgrade --quiet --output-file constraints.txt

clean:
	rm -rf $(VENV) $(VENV)-bench $(VENV)-nightly build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

setup: $(SET_UP)-dev
ifeq ($(MONARCH),nightly)
	$(BIN)/python -m pip --disable-pip-version-check --quiet install --upgrade 'torchmonarch>=0.8.0.dev0,<0.9'
else ifneq ($(MONARCH),)
	$(error MONARCH=$(MONARCH) is unknown: leave it out, or set it to nightly)
endif

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "meshgate needs Python 3.10 or later; name one with make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(SET_UP)-demo: $(PINNED) | $(VENV)/bin/python
	@echo "installing meshgate and Monarch into $(VENV), which takes a minute or two"
	$(PIP) install -e '.[gateway,worker]'
	@touch $@

$(SET_UP)-%: $(SET_UP)-demo
	$(PIP) install -e '.[$*]'
	@touch $@
