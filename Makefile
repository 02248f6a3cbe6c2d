# Two commands on a fresh machine: `make demo` runs the kernels, `make test` checks them. Both install first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint docs clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/tile-kernels demo

test: $(STAMP) lint
	$(BIN)/pytest --numprocesses=auto

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tools.docs --check

docs: $(STAMP)
	$(BIN)/python -m tools.docs

clean:
	rm -rf $(VENV) build dist *.egg-info
