# `make test` and `make run` work on a fresh machine with Python 3.11 or newer and make; the second time they are quick.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test run lint install clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	# torch by itself and by its exact version: where a build for CPUs is to be had, this takes it.
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

test: install
	$(BIN)/python -m pytest

run: install
	$(BIN)/python examples/quickstart.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
