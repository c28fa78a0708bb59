# `make demo` and `make test` set up everything that they need.
PYTHON ?= python3
BIN := .venv/bin
# One process a core; torch takes one thread in each, so that they do not fight over cores.
export OMP_NUM_THREADS := 1

.PHONY: demo test test-slow soak lint bench clean

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/installed
	rm -rf runs/demo
	$(BIN)/python examples/ppo.py --output-dir runs/demo

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n auto

test-slow: .venv/installed
	$(BIN)/python -m pytest -n auto -m slow

# Envs that fail at random, for MINUTES.
MINUTES ?= 10
soak: .venv/installed
	$(BIN)/python tests/soak.py --minutes $(MINUTES)

bench: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
