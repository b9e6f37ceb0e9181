# `make test` and `make run` work on a fresh machine with Python 3.11 or newer and make; the second time they are quick.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test run lint docs install clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	# torch by itself and by its exact version: where a build for CPUs is to be had, this takes it.
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# One process with one thread for each core: the tests are many small problems.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8

# A learned kernel against its frozen self, a fixed kernel and softmax, on a small version of the sparsity task.
run: install
	$(BIN)/klformer compare --task sparsity --attentions gmm-rks gmm-rks:frozen=true performer softmax --out runs/demo \
	  --data.num-examples 20000 --data.max-len 24 --data.validation-limit 500 --data.test-limit 1000 \
	  --model.num-layers 2 --training.max-steps 500 --training.evaluate-every 100 --training.evaluation-draws 5

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The docs as a site in site/; a link or a name that leads nowhere is an error.
docs: install .venv/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

.venv/docs-installed: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
