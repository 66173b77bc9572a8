# The two commands a user needs are `make writeup` and `make test`; both set up .venv first, once.
VENV := .venv
# The newest Python from 3.11 on that the machine has; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
STAMP := $(VENV)/.installed
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup writeup explore dry-run status example test test-fast licences lint format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP) ## install everything into .venv (the others do it for you)

$(STAMP): requirements.lock requirements-torch.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-torch.lock
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

writeup: setup ## measure what is not measured yet and write report/writeup.md
	snakemake --cores 1 --resources gpu=1 report/writeup.md

explore: setup ## write report/explore.html, the interactive page
	snakemake --cores 1 --resources gpu=1 report/explore.html

dry-run: setup ## show what `make writeup` would do
	snakemake --cores 1 --dry-run --quiet rules

status: setup ## list all points: measured, failed, stale
	lmlab status

example: setup ## render docs/nvidia-h200 from the committed results, measuring nothing
	snakemake --cores 1 --config machine=nvidia-h200 measure=never report=docs/nvidia-h200 -- \
		docs/nvidia-h200/writeup.md docs/nvidia-h200/explore.html

# In the order and groups of tests/conftest.py. Slow tests wait a lot, so four processes fill two cores.
PYTEST := pytest --dist loadfile --no-loadscope-reorder

test: setup lint ## every check and every test
	$(PYTEST) -n 4

test-fast: setup ## all but the slow tests, for work in progress
	$(PYTEST) -n 2 -m "not slow"

licences: setup ## list every installed package with its version and licence
	python .ci/licences.py

lint: setup ## style, types and workflow
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile rules workflow/Snakefile
	mypy
	snakemake --lint

format: setup ## put Python and Snakemake files in order
	ruff check --fix .
	ruff format .
	snakefmt Snakefile rules workflow/Snakefile

clean: ## remove what can be rebuilt from results, never the results
	rm -rf report/writeup.md report/index.md report/explore.html report/figures report/chapters report/compare.md report/compare logs
