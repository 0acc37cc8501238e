# Needs only Python >= 3.10 and make. Everything is installed into .venv, once, and reused.
#
#   make demo     hyperkron clean on mislabelled digits: wrong labels found, and a report
#   make test     lint, types, doctests and tests
#   make long     the tests that take too long for `make test`, and no others
#   make bench    speed and memory against peers
#   make faults   kill, signal and damage runs, and count those that survive
#   make grid     every model × λ × hypergradient against an oracle, and count those silently wrong
#   make site     the documentation as web pages, in build/site
#   make audit    known vulnerabilities of the pinned versions, where the database can be reached
#   make ranks    1 to 4 processes give the same numbers, and survive a kill of one
#   make sweeps   kill one of four sweep workers, 20 times, and count trials that are lost, stuck or done twice
#   make soak     ten thousand steps: memory, hooks and file handles
#   make format   let ruff rewrite the code in the house style
#   make clean    remove caches and builds (make distclean: the environment too)
#
# Variables: PYTHON (which interpreter makes .venv), WORKERS (test processes), PYTEST_ARGS,
# PIP_FLAGS (for example PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# to get the small CPU build of torch where PyPI would give the CUDA one).

PYTHON      ?= python3
WORKERS     ?= 2
PYTEST_ARGS ?=
PIP_FLAGS   ?=

PY    := .venv/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
PIP    := $(INSTALL) -c constraints.txt
# Without --no-compile, pip would compile all modules of all these packages; Python compiles those it imports.
HASHED := $(INSTALL) --require-hashes --no-deps --only-binary :all: --no-compile
STAMP := .venv/.installed
CODE  := $(wildcard src tests support examples benchmarks experiments docs conftest.py)
BENCHMARKS ?= $(sort $(wildcard benchmarks/bench_*.py))

# Tests start many processes, each of which would compile the library again.
export PYTHONDONTWRITEBYTECODE :=

# The stamp holds the path of the checkout, because the editable install does: a moved checkout is set up again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
STALE := stale
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help venv demo test lint types unit long bench faults ranks sweeps grid site audit soak format clean distclean stale

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt requirements/lock.txt $(STALE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "hyperkron needs Python >= 3.10, but '$(PYTHON)' is `command -v $(PYTHON) >/dev/null && $(PYTHON) --version 2>&1 || echo missing`."; \
	  echo "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "Making .venv with `$(PYTHON) --version`"; $(PYTHON) -m venv --clear .venv; }
	@echo "Installing the pinned environment into .venv (the first time takes a few minutes: torch is large)"
	@$(PIP) --no-deps torch & torch=$$!; $(HASHED) -r requirements/lock.txt; status=$$?; wait $$torch && exit $$status
	@$(PIP) torch
	@$(PIP) --no-build-isolation --no-deps -e .
	@printf '%s\n' "$(CURDIR)" > $@

demo: $(STAMP)
	$(PY) examples/demo.py

test: lint types unit

lint: $(STAMP)
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check --quiet $(CODE)

types: $(STAMP)
	$(PY) -m mypy

# One thread per process: the two workers would otherwise fight over the cores. Each takes a stretch of the tests and
# the idle one takes from the other, so that few fixtures of a file are made by both.
unit: export OMP_NUM_THREADS := 1
unit: $(STAMP)
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

long: export OMP_NUM_THREADS := 1
long: $(STAMP)
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m long $(PYTEST_ARGS)

bench: $(STAMP)
	@test -n "$(BENCHMARKS)" || { echo "No benchmarks/bench_*.py here."; exit 1; }
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(PY) $$script; done

faults: export OMP_NUM_THREADS := 1
faults: $(STAMP)
	$(PY) benchmarks/faults.py

ranks: export OMP_NUM_THREADS := 1
ranks: $(STAMP)
	$(PY) benchmarks/ranks.py

sweeps: export OMP_NUM_THREADS := 1
sweeps: $(STAMP)
	$(PY) benchmarks/sweep_faults.py

grid: export OMP_NUM_THREADS := 1
grid: $(STAMP)
	$(PY) benchmarks/correctness_grid.py

# The generator has an environment of its own: it reads the source, and imports nothing of it. A broken link is an error.
build/site-env/.installed: requirements/site.txt
	@$(PYTHON) -m venv --clear build/site-env
	@build/site-env/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-deps -r $<
	@touch $@

site: $(STAMP) build/site-env/.installed
	$(PY) docs/site/sources.py build/site-sources
	build/site-env/bin/zensical build --clean --strict
	@echo "Open build/site/index.html"

audit: $(STAMP)
	$(PY) requirements/audit.py

soak: export OMP_NUM_THREADS := 1
soak: $(STAMP)
	$(PY) benchmarks/soak.py

format: $(STAMP)
	$(PY) -m ruff check --fix $(CODE)
	$(PY) -m ruff format $(CODE)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
