# `make test` and `make run` work on a fresh machine with Python 3.11 or newer and make; the second time they are quick.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test run lint docs docs-check evidence figures report install clean

install: .venv/installed

.venv/installed: .venv/run-installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# What running needs, without the tools of developers.
.venv/run-installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	# torch by itself and by its exact version: where a build for CPUs is to be had, this takes it.
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[lab]'
	touch $@

# One process with one thread for each core: the tests are many small problems.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8

test: install
	$(PYTEST) --ignore tests/docs

# What pages say: sentences, links, tables and figures as the data has them, and every block of code is run.
docs-check: docs
	$(PYTEST) tests/docs

# A small softmax model is trained, and its attention replaced by a fixed kernel and by kernels that are learned from it.
run: .venv/run-installed
	OMP_NUM_THREADS=1 $(BIN)/klformer demo --out runs/demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The figures of README and concept pages, from numbers that are in the repository.
figures: install
	$(BIN)/python -m research.draw

# One page of all runs that are kept, in site/report.html.
report: install
	for archive in research/runs/*.tar.xz; do \
	  mkdir -p site/runs/$$(basename $$archive .tar.xz) && tar xf $$archive -C site/runs/$$(basename $$archive .tar.xz); done
	$(BIN)/klformer report site/runs --analysis research/data --out site/report.html --title "Long Range Arena and sparsity at laptop budgets"

# The docs as a site in site/; a link or a name that leads nowhere is an error.
docs: install .venv/docs-installed
	$(BIN)/zensical build --strict

# Tables and figures of the docs and of research/, made again of their data.
evidence: figures
	$(BIN)/python -m research.evidence.pages docs research/pages README.md

.venv/docs-installed: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv build site .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
