# On a fresh machine `make demo` runs the kernels, `make quick` checks a change, `make test` checks everything.
# Each installs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo quick test lint ruff docs site clean
.DEFAULT_GOAL := test

# The distribution was called tile-kernels before; that name belongs to another project.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip uninstall --quiet --disable-pip-version-check --yes tile-kernels
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/tile-kernels demo

quick: $(STAMP) ruff
	@echo 'make quick: the core and one case of every op, 1 minute on 2 idle cores'
	$(BIN)/pytest --quick --numprocesses=2

test: $(STAMP)
	@echo 'make test: every test, about 14 minutes on 2 idle cores; make quick takes 1'
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python tools/sizes.py
	$(BIN)/pytest --numprocesses=auto --dist=worksteal

lint: $(STAMP) ruff
	$(BIN)/mypy
	$(BIN)/python -m tools.docs --check

ruff: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

docs: $(STAMP)
	$(BIN)/python -m tools.docs

site: $(STAMP)
	$(BIN)/python -m tools.docs.site

clean:
	rm -rf $(VENV) site build dist *.egg-info
