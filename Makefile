# `make demo` and `make test` install all that they need. Others: test-full, unit, docs, lint, programs-test, runtime-test,
# cluster-test, variants-test, versions-test, lock, cluster-up, cluster-down, cluster-shell, benchmark, moved, clean.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Demo and tests run with these versions; the package itself takes a wide range (pyproject.toml). `make lock` renews them.
LOCK := requirements.lock
TORCH := torch==2.13.0
PIP := PIP_CONSTRAINT=$(LOCK) PIP_BUILD_CONSTRAINT=$(LOCK) $(BIN)/python -m pip install -q
PIP_ARGS ?=
RESUME ?=
STEPS ?=
DEMO := demo.yaml

.PHONY: demo test test-full unit docs lint programs-test runtime-test cluster-test variants-test versions-test newest-test lowest-test lowest-runtime-test lock cluster-up cluster-down cluster-shell benchmark moved clean system

# --- set-up: one virtual environment in stages; `make unit` and `make programs-test` need no torch

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "slurmddp needs Python 3.10 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(MAKE) --no-print-directory python-venv
	$(PYTHON) -m venv $(VENV)
	touch $@

.PHONY: python-venv
python-venv:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends python3-venv; \
	else echo "python3-venv is missing: ask for the Debian package, or use another PYTHON"; exit 1; fi

$(VENV)/.unit: $(VENV)/.made pyproject.toml $(LOCK)
	$(PIP) $(PIP_ARGS) -e '.[unit]'
	touch $@

$(VENV)/.train: $(VENV)/.made pyproject.toml $(LOCK)
	$(PIP) $(PIP_ARGS) '$(TORCH)' -e '.[train]'
	touch $@

$(VENV)/.test: $(VENV)/.unit $(VENV)/.train
	$(PIP) $(PIP_ARGS) '$(TORCH)' -e '.[test,lint]'
	touch $@

# Whose clients `slurmddp sync` uses: large, so for make test-full alone.
$(VENV)/.trackers: $(VENV)/.test
	$(PIP) $(PIP_ARGS) wandb mlflow-skinny
	touch $@

# The newest versions of everything, for Python 3.10 and later in one file. RENEW= keeps those that it has.
RENEW ?= --upgrade
lock: $(VENV)/.uv
	echo '$(TORCH)' | $(BIN)/uv pip compile -q $(RENEW) --universal --python-version 3.10 --extra test --extra lint --extra docs \
		--no-annotate --custom-compile-command 'make lock' --constraint - pyproject.toml -o $(LOCK)

# Debian packages that tests use, as PROGRAM:PACKAGE: only as root, only where they are missing.
DEBIAN := shellcheck:shellcheck git:git openssl:openssl docker-registry:docker-registry rsync:rsync sshd:openssh-server mawk:mawk gawk:gawk
test-full: DEBIAN += chromium:chromium
system:
	@missing=(); for pair in $(DEBIAN); do \
		command -v "$${pair%%:*}" >/dev/null || missing+=("$${pair##*:}"); done; \
	if [ "$${#missing[@]}" -gt 0 ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$${missing[@]}"; \
		else echo "not installed, and we are not root: $${missing[*]} (their tests are skipped)"; fi; fi

# --- the demo: two ranks, or one on each GPU, train a byte-level GPT on the Python standard library's own sources

demo: $(VENV)/.train
	@test -e $(DEMO) || $(BIN)/slurmddp init $(DEMO) --site local --task lm
	@if [ -n "$(RESUME)" ]; then \
		$(BIN)/slurmddp run --resume $(if $(filter 1 yes true,$(RESUME)),last,$(RESUME)) $(if $(STEPS),--set train.steps=$(STEPS)); \
	else \
		$(BIN)/slurmddp run $(DEMO) $(if $(STEPS),--set train.steps=$(STEPS)); \
	fi
	@$(BIN)/slurmddp status last
	@echo "again: make demo    continue from its checkpoint: make demo RESUME=1 STEPS=400"

# --- tests

# `make test` runs one test per feature; `make test-full` also runs those marked `long` (repetitions, long faults).
SELECT := -m "not long"
# A test that had to run twice counts over all parts; more than two fail the run (tests/reruns.py).
test: export SLURMDDP_RERUNS := build/reruns
# lint and programs-test are light enough for two cores at once; each shows its output when it is over. Ranks and clusters
# have deadlines: beside one another, two of a hundred tests had to run twice.
test: forget-reruns system build-cluster unit $(VENV)/.test
	$(MAKE) --no-print-directory -j2 --output-sync=target SELECT='$(SELECT)' lint programs-test
	$(MAKE) --no-print-directory SELECT='$(SELECT)' runtime-test cluster-test

test-full: SELECT :=
test-full: export SLURMDDP_KILLS := 20
test-full: $(VENV)/.trackers test docs versions-test variants-test moved

# What the cluster is made of, where the cache lacks it (two minutes): mostly downloads, so it starts beside the first parts.
# cluster-test waits for it, and says what is wrong.
.PHONY: build-cluster
build-cluster: $(VENV)/.made
	@mkdir -p build
	@nohup $(BIN)/python -m tests.cluster build >build/cluster.log 2>&1 </dev/null &

.PHONY: forget-reruns
forget-reruns:
	@rm -f build/reruns

unit: $(VENV)/.unit
	$(BIN)/python -m pytest -q -n $$(($$(nproc) + 1)) --dist worksteal --reruns 1 --rerun-show-tracebacks --timeout=300 $(SELECT) tests/unit tests/golden

# The documentation site: a page or section that a link names and that does not exist is an error. Its search has to answer
# the questions of docs/site/questions.txt, where there is a Chromium to ask them.
docs: $(VENV)/.docs
	$(BIN)/sphinx-build -q -W --keep-going -c docs/site . build/docs
	$(BIN)/python docs/site/questions.py build/docs
	@echo build/docs/docs/index.html

$(VENV)/.docs: $(VENV)/.made pyproject.toml $(LOCK)
	$(PIP) $(PIP_ARGS) -e '.[docs]'
	touch $@

# Whole programs as real processes: much of their time is waiting.
programs-test: $(VENV)/.unit
	$(BIN)/python -m pytest -q -n $$(($$(nproc) * 2)) --dist worksteal --reruns 1 --rerun-show-tracebacks --timeout=300 $(SELECT) tests/programs

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if command -v shellcheck >/dev/null; then printf '%s\0' tests/golden/kinds/*.sh | xargs -0 -n 6 -P 2 shellcheck -x -P slurmddp/shell; \
	else echo "shellcheck is not installed, so the scripts were not checked: make system"; test -z "$$SLURMDDP_REQUIRE_CLUSTER"; fi

# Real processes on a busy machine miss a deadline now and then: a test may run once more, and is named at the end.
# Most of the time is waiting, so two or three run at once: tests/cluster on a cluster of its own each, a file at a time.
# Nothing may hang for ever: --timeout is far beyond what the slowest test takes, with its fixtures (a second try has none).
runtime-test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal --reruns 1 --rerun-show-tracebacks --durations=25 --timeout=900 $(SELECT) tests/runtime

cluster-test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --reruns 1 --rerun-show-tracebacks --durations=25 --timeout=1800 $(SELECT) tests/cluster

# Other clusters, one after the other: the oldest and the newest Slurm that Debian has, process tracking by cgroups, 64 nodes.
VARIANTS := slurm-22.05 slurm-26.05 cgroups
VARIANT_TESTS := $(addprefix tests/cluster/test_,check.py login_side.py recovery.py rehearse.py site_init.py standby.py)
variants-test: $(VENV)/.test
	failed=0; for variant in $(VARIANTS); do echo "cluster: $$variant"; SLURMDDP_CLUSTER_VARIANT=$$variant \
		$(BIN)/python -m pytest -q -n 3 --dist loadfile --reruns 1 --rerun-show-tracebacks --timeout=1800 -rs -m "not long" $(VARIANT_TESTS) \
		|| failed=1; done; exit $$failed
	SLURMDDP_CLUSTER_VARIANT=64-nodes $(BIN)/python -m pytest -q --timeout=1800 tests/cluster/test_many_nodes.py && cat build/many-nodes.txt

# The lowest versions that pyproject.toml allows, with torch 2.4 (3 GB with its CUDA packages), and the newest of today.
# uv looks for Pythons in PATH, and may download one; it does not look into pyenv's folders.
find-python = $(or $(lastword $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python$(1))),$(1))
LOWEST_PYTHON ?= $(call find-python,3.10)
NEWEST_PYTHON ?= $(call find-python,3.13)
$(VENV)/.uv: $(VENV)/.made
	$(BIN)/python -m pip install -q $(PIP_ARGS) uv
	touch $@

.venv-lowest/.made: $(VENV)/.uv pyproject.toml
	$(BIN)/uv venv -q --clear --seed --python $(LOWEST_PYTHON) $(@D)
	$(BIN)/uv pip install -q --python $(@D) --resolution lowest-direct -e '.[test]'
	touch $@

.venv-newest/.made: $(VENV)/.uv pyproject.toml
	$(BIN)/uv venv -q --clear --seed --python $(NEWEST_PYTHON) $(@D)
	$(BIN)/uv pip install -q --python $(@D) -e '.[unit]'
	touch $@

versions-test: newest-test lowest-test lowest-runtime-test

newest-test lowest-test: %-test: .venv-%/.made
	.venv-$*/bin/python -m pytest -q -n 3 --dist worksteal --timeout=300 tests/unit tests/golden tests/programs

lowest-runtime-test: .venv-lowest/.made
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -q -n 2 --dist worksteal --reruns 1 --timeout=900 tests/runtime

# --- the test cluster, for people (root only; see tests/cluster/README.md)

cluster-up cluster-down: $(VENV)/.made
	$(BIN)/python -m tests.cluster $(subst cluster-,,$@)

HOST ?= login
cluster-shell: $(VENV)/.made
	$(BIN)/python -m tests.cluster shell $(HOST)

# Which published figures no longer hold. It prints them, and never fails because of a time.
moved: $(VENV)/.test
	$(BIN)/python -m benchmarks.moved

benchmark: $(VENV)/.test
	$(BIN)/python -m benchmarks.cli
	$(BIN)/python -m benchmarks.runs
	$(BIN)/python -m benchmarks.images
	$(BIN)/python -m benchmarks.preflight
	$(BIN)/python -m benchmarks.launch
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.stragglers
	$(BIN)/python -m benchmarks.observe
	$(BIN)/python -m benchmarks.recovery --write # as root; an hour

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest build dist *.egg-info
