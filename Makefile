# The same targets run by hand and in CI. `make help` lists them.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools

.PHONY: help install demo format check test bench chaos sanitize clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

install: $(TOOLS)  ## make .venv with the package and its tools, versions pinned by constraints.txt

$(READY): pyproject.toml constraints.txt $(wildcard native/*)
	$(PYTHON) -c 'import sys; sys.exit("the pinned versions need Python 3.11 or newer: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

$(TOOLS): $(READY)
	$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*extras["test"], *extras["integrations"], *extras["check"], sep="\n")' > $(VENV)/tools.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement $(VENV)/tools.txt
	touch $@

demo: $(READY)  ## LAMB against 1-bit LAMB: four workers, a small BERT, real text; under 6 minutes on 2 cores
	$(BIN)/onebit compare recipes/demo.toml --out runs/demo --overwrite

format: $(TOOLS)  ## rewrite the code in the agreed style
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

check: $(TOOLS)  ## style, types and the order of the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(TOOLS)  ## all tests; ARGS=... is passed to pytest
	$(BIN)/pytest $(ARGS)

bench: $(READY)  ## time the optimizer step against a copy of the same memory
	$(BIN)/onebit bench $(ARGS)

chaos: $(TOOLS)  ## kill processes, malform files, flip bits by the hundred; under half an hour; ARGS=... for fewer
	$(BIN)/python benchmarks/chaos.py --json benchmarks/results/chaos-$$(date +%F).json $(ARGS)

sanitize: $(TOOLS)  ## the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	.ci/sanitize $(BIN)/python

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
