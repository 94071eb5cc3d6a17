# make demo   train FedAvg, FedBCGD and FedPAQ on the images in the package; table and plot
# make test   the tests
# Both create .venv on first use, from constraints.txt.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint bench clean

help:
	@echo "make demo       train FedAvg, FedBCGD and FedPAQ on real images under one upload budget (minutes)"
	@echo "make test       run the tests"
	@echo "make test-slow  run the long tests"
	@echo "make lint       ruff, mypy and import layers"
	@echo "make bench      measure, side by side"
	@echo "make clean      remove .venv, caches and the demo's output"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No python3 found: install Python 3.11 or newer, or say make PYTHON=/path/to/python"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is too old: Python 3.11 or newer is needed (make PYTHON=/path/to/python)"; exit 2; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# A stamp per set of packages: the second call finds it and installs nothing.
$(VENV)/.core: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing fedbcgd and what it needs into $(VENV) (once; PyTorch is large)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "Installing the test tools into $(VENV) (once)"
	@$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/.core
	@$(BIN)/fedbcgd demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow --timeout 3600

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.core
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis fedbcgd-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
