# `make demo` and `make test` set up everything that they need.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check
# Neighbours share fixtures, so each process begins with a run of tests and takes others' at its end.
PARALLEL := -n auto --dist worksteal
# One process a core; torch takes one thread in each, so that they do not fight over cores.
export OMP_NUM_THREADS := 1

.PHONY: demo suite docs test test-slow test-versions test-oldest test-newest test-torch test-next lerobot census package soak lint bench bench-quick simulate-races gpu clean

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) -c constraints.txt torch
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

# The demo needs less than the tests do, and says what it installs.
.venv-demo/installed: pyproject.toml constraints.txt
	test -x .venv-demo/bin/python || $(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install --disable-pip-version-check -c constraints.txt torch
	.venv-demo/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[examples]'
	touch $@

demo: .venv-demo/installed
	rm -rf runs/demo
	.venv-demo/bin/python examples/ppo.py --output-dir runs/demo

# A race of two policies, until it is decided: less than a minute.
race: .venv/installed
	$(BIN)/tdcollect race CartPole-v1 --policy lean=examples/policies.py:lean \
		--policy catch=examples/policies.py:catch --block 2 --max-episode-steps 60 \
		--return-range 0 60 --workers 2 --output-dir runs/race

# A suite of three tasks and three policies, one of which is trained first: two minutes in all.
suite: .venv/installed
	$(BIN)/python examples/suite/train.py
	$(BIN)/tdcollect suite run examples/suite/suite.toml --output-dir runs/suite/report --workers 2

# The site, in site/: open site/index.html.
docs: .venv/installed
	$(BIN)/python -m sphinx -W --keep-going -q -c docs . site

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: .venv/installed
	$(BIN)/python -m pytest $(PARALLEL) -m slow

# The tests with the oldest and with the newest versions that pyproject.toml allows, Python's too.
OLDEST_PYTHON ?= python3.11
NEWEST_PYTHON ?= python3.13

test-versions: test-oldest test-newest

test-oldest:
	$(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python $(INSTALL) -c constraints-oldest.txt -e '.[dev]'
	.venv-oldest/bin/python -m pytest $(PARALLEL)

test-newest:
	$(NEWEST_PYTHON) -m venv .venv-newest
	.venv-newest/bin/python $(INSTALL) --upgrade --upgrade-strategy eager -e '.[dev]'
	.venv-newest/bin/python -m pytest $(PARALLEL)

# The tests with another torch, which pyproject.toml may not allow (yet): make test-torch TORCH=2.11
test-torch:
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python $(INSTALL) -e '.[dev]'
	.venv-torch/bin/python $(INSTALL) 'torch==$(TORCH).*'
	.venv-torch/bin/python -m pytest $(PARALLEL)

# The tests with the newest torch, tensordict and TorchRL, whatever they pin, and a table of what
# breaks; make test-next TORCHRL=../rl takes a checkout, TORCHRL=torchrl-nightly the latest build.
TORCHRL ?= torchrl
test-next:
	$(PYTHON) -m venv .venv-next
	.venv-next/bin/python $(INSTALL) --upgrade -e '.[dev]' torch
	.venv-next/bin/python -m pip uninstall --quiet --yes torchrl torchrl-nightly
	.venv-next/bin/python $(INSTALL) --upgrade --no-deps tensordict $(TORCHRL)
	.venv-next/bin/python -m pytest $(PARALLEL) --tb=no -rfE

# LeRobot's policies on PushT, Aloha and MetaWorld, beside its own evaluation: about nine minutes of
# processor time, after gigabytes of packages. Aloha and MetaWorld pin versions of MuJoCo, so each has an
# environment of its own, which takes all else from that of LeRobot.
LEROBOT_PYTHON ?= python3.12
LEROBOT := .venv-lerobot/bin/python
ADDED := import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))
lerobot: .venv-lerobot-aloha/installed .venv-lerobot-metaworld/installed
	$(LEROBOT) -m pytest tests/robots
	MUJOCO_GL=egl EPISODE_LENGTH=6 .venv-lerobot-aloha/bin/python -m pytest -k aloha tests/robots
	MUJOCO_GL=egl EPISODE_LENGTH=6 .venv-lerobot-metaworld/bin/python -m pytest -k metaworld tests/robots

.venv-lerobot/installed:
	$(LEROBOT_PYTHON) -m venv .venv-lerobot
	$(LEROBOT) $(INSTALL) 'lerobot[diffusion,evaluation,pusht]==0.6.1' \
		hypothesis pytest pytest-timeout -e '.[evaluate,video]'
	touch $@

.venv-lerobot-aloha/installed: PACKAGES := gym-aloha==0.1.5
.venv-lerobot-metaworld/installed: PACKAGES := metaworld==3.0.0 mujoco==3.3.0
.venv-lerobot-%/installed: .venv-lerobot/installed
	$(LEROBOT_PYTHON) -m venv $(@D)
	$(LEROBOT) -c '$(ADDED)' > $$(echo $(@D)/lib/python*/site-packages)/lerobot.pth
	$(@D)/bin/python $(INSTALL) $(PACKAGES) lerobot==0.6.1
	touch $@

# The wheel and the source archive, in dist/: built from what is committed, checked, installed into a
# venv of its own, and tested there. REPOSITORY, its address, goes into their links.
REPOSITORY ?=
package: .venv/installed
	$(BIN)/python $(INSTALL) -c constraints.txt build twine
	rm -rf build/package dist
	git clone --quiet . build/package
	$(if $(REPOSITORY),$(BIN)/python .ci/place.py $(REPOSITORY) build/package)
	$(BIN)/python -m build --no-isolation --outdir dist build/package
	$(BIN)/python -m twine check --strict dist/*
	TDCOLLECT_DIST=dist $(BIN)/python -m pytest -m slow tests/package/test_wheel.py

# Env packages of PyPI, each in an environment of its own: docs/census.md. An hour and more; it goes on
# where it was stopped. It runs the code of all of them.
census: .venv/installed
	PYTHONPATH=$(CURDIR) $(BIN)/python benchmarks/census.py --jobs 2

# Envs that fail at random, for MINUTES.
MINUTES ?= 10
soak: .venv/installed
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

bench: .venv/installed
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/run.py

# The speed of what is here beside that of commit BASE, in turns: three minutes. Run it before and
# after a change to collect/ or envs/.
BASE ?= HEAD~1

bench-quick: .venv/installed
	rm -rf runs/base && git worktree prune && git worktree add --quiet --detach runs/base $(BASE)
	$(BIN)/python benchmarks/interpreters.py runs/base .; \
		status=$$?; git worktree remove --force runs/base; exit $$status

# The simulations of races in docs/statistics.md. Three other rules are compared, by packages that
# nothing else here needs.
simulate-races:
	$(PYTHON) -m venv .venv-races
	.venv-races/bin/python $(INSTALL) numpy scipy adastop==0.1.3 sequentialized-barnard-tests==0.0.9 nscore==0.1.2
	PYTHONPATH=$(CURDIR) .venv-races/bin/python benchmarks/races.py

# Tests and benchmarks that need a GPU, in under 10 minutes, or in fewer: make gpu GPU_MINUTES=4.
# Results in runs/gpu. Another interpreter, which has the packages, is taken as it is:
# make gpu GPU_PYTHON=python3
GPU_MINUTES ?= 9.5
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/installed)
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(GPU_PYTHON) benchmarks/gpu.py --minutes $(GPU_MINUTES)

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-torch .venv-next .venv-demo .venv-lerobot* .venv-races runs site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
