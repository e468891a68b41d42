# make setup | run | test | test-all | lint | bench | docs
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROJECTS := . plugins/full plugins/swa plugins/recurrent plugins/hicache_stub engine
EDITABLE := -e ".[cli,dev]" $(foreach p,$(filter-out .,$(PROJECTS)),-e $(p))
STAMP := $(VENV)/.installed
# A real model, a tiny hybrid of each recurrent backend, a tiny one with sliding windows, and a
# trained one whose answers are right.
RUNS := smollm2 kda gdn gla swa recall

.PHONY: setup run test test-all lint bench docs

setup: $(STAMP)

$(STAMP): pyproject.toml $(wildcard plugins/*/pyproject.toml) engine/pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) not found; run: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "UHRC needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Run: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment; install its venv module" \
	       "(Debian: apt install python3-venv)."; rm -rf $(VENV); exit 1; }
	$(PIP) install --quiet --constraint constraints.txt hatchling
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation $(EDITABLE)
	@touch $@

run: setup
	@for config in $(RUNS); do $(BIN)/uhrc run configs/$$config.toml || exit; done

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: setup
	$(BIN)/python -m pytest -q $(wildcard benchmarks/*_*.py)

docs: setup
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "written to site/index.html"
