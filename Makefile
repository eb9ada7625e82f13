# Two commands on a fresh machine with Python and a package index: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart test test-slow test-gpu lint format clean

quickstart: $(VENV)/.core
	$(BIN)/paddock plan algorithm.adv_estimator=grpo

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n 2

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and pinned: an open range would bring gigabytes of CUDA packages to a machine without a GPU.
$(VENV)/.core: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a few minutes, once."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) torch
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@$(INSTALL) -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
