# megaverl: `make help` lists the targets.
VENV   ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
SEED   ?= 0
LAYOUT ?= tp2
PIP     = $(VENV)/bin/python -m pip --disable-pip-version-check
READY   = $(VENV)/.ready

# One thread per process: several workers share the cores, and more threads than cores make each of them slower.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup demo test test-fast lint format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## create .venv and install the pinned requirements

$(READY): requirements/cpu.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v in ((3, 11), (3, 12)) else f"megaverl needs CPython 3.11 or 3.12, {sys.executable} is {v[0]}.{v[1]}; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-deps -r requirements/cpu.lock
	$(PIP) install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
	@touch $@

demo: $(READY)  ## the main job end to end on the CPU (SEED=0|1|2.. LAYOUT=tp2|dp2)
	$(VENV)/bin/megaverl demo --seed $(SEED) --layout $(LAYOUT)

test: $(READY) lint  ## all tests that this machine can run
	$(VENV)/bin/python -m pytest tests

test-fast: $(READY)  ## unit tests alone (no processes)
	$(VENV)/bin/python -m pytest tests/unit

lint: $(READY)  ## ruff: rules and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(READY)  ## let ruff mend what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove .venv and caches (runs/ stays)
	rm -rf $(VENV) .pytest_cache .ruff_cache build megaverl.egg-info
