# Everything sets up what it needs: a virtual environment in .venv, and for the tests the cdktf and cdktn programs.
PYTHON ?= python3
VENV := .venv
BIN := $(abspath $(VENV))/bin
NPM := tests/npm
export PYTHON

.PHONY: quickstart test test-all test-aws lint bench update-golden clean

quickstart: $(VENV)/.quickstart
	PATH="$(BIN):$$PATH" sh stacks/quickstart/quickstart.sh

test: $(VENV)/.dev $(NPM)/node_modules/.installed lint
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/.dev $(NPM)/node_modules/.installed lint
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest

test-aws: $(VENV)/.dev
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/integration/aws

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	PATH="$(BIN):$$PATH" $(BIN)/python -m benchmarks

update-golden: $(VENV)/.dev
	UPDATE_GOLDEN=1 PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -q tests/test_golden.py

clean:
	rm -rf $(VENV) $(NPM)/node_modules

$(VENV)/.quickstart: pyproject.toml constraints.txt tools/venv.sh
	sh tools/venv.sh $(VENV) cdktf,toolchain
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt tools/venv.sh
	sh tools/venv.sh $(VENV) cdktf,cdktn,toolchain,dev
	touch $@

# Without npm the tests that need these programs say so: they fail under CI and are skipped elsewhere.
$(NPM)/node_modules/.installed: $(NPM)/package.json
	if command -v npm >/dev/null; then npm install --prefix $(NPM) --no-package-lock --no-audit --no-fund --loglevel=error; fi
	mkdir -p $(@D)
	touch $@
