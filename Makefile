# `make demo` and `make test` install all that they need. Others: test-full, lint, unit, runtime-test, cluster-test,
# cluster-up, cluster-down, cluster-shell, benchmark, clean.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The version that demo and tests run with; the package itself takes a wide range.
TORCH := torch==2.13.0
PIP_ARGS ?=
RESUME ?=
STEPS ?=
DEMO := demo.yaml

.PHONY: demo test test-full lint unit runtime-test cluster-test cluster-up cluster-down cluster-shell benchmark clean system

# --- set-up: one virtual environment, made anew when what it is made of changes

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

$(VENV)/.train: $(VENV)/.made pyproject.toml
	$(BIN)/pip install -q $(PIP_ARGS) '$(TORCH)' -e '.[train]'
	touch $@

$(VENV)/.test: $(VENV)/.train
	$(BIN)/pip install -q $(PIP_ARGS) '$(TORCH)' -e '.[train,test,lint]'
	touch $@

# Debian packages that tests use: only as root, only where they are missing.
system:
	@missing=(); for pair in shellcheck:shellcheck git:git openssl:openssl docker-registry:docker-registry rsync:rsync; do \
		command -v "$${pair%%:*}" >/dev/null || missing+=("$${pair##*:}"); done; \
	if [ "$${#missing[@]}" -gt 0 ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$${missing[@]}"; \
		else echo "not installed, and we are not root: $${missing[*]} (their tests are skipped)"; fi; fi

# --- the demo: two ranks train a byte-level GPT on the Python standard library's own sources

demo: $(VENV)/.train
	@test -e $(DEMO) || $(BIN)/slurmddp init $(DEMO) --site local --task lm
	@if [ -n "$(RESUME)" ]; then \
		$(BIN)/slurmddp run --resume $(if $(filter 1 yes true,$(RESUME)),last,$(RESUME)) $(if $(STEPS),--set train.steps=$(STEPS)); \
	else \
		$(BIN)/slurmddp run $(DEMO) $(if $(STEPS),--set train.steps=$(STEPS)); \
	fi
	@$(BIN)/slurmddp status last
	@echo "again: make demo    go on from its checkpoint: make demo RESUME=1 STEPS=400"

# --- tests

# `make test` runs one test per feature; `make test-full` also runs those marked `long` (repetitions, long faults).
SELECT := -m "not long"
test: system lint unit runtime-test cluster-test

test-full: SELECT :=
test-full: test

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.test
	$(BIN)/python -m pytest -q -n auto --timeout=300 $(SELECT) tests/unit tests/golden

# Real processes on a busy machine miss a deadline now and then: a test may be run once more, and the last line says so.
# Half of the time is waiting, so two go on at once: tests/cluster on a cluster of its own each, a file at a time.
# Nothing may hang for ever: --timeout is far beyond what the slowest test takes, with its fixtures (a second try has none).
runtime-test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal --reruns 1 --rerun-show-tracebacks --durations=25 --timeout=900 $(SELECT) tests/runtime

cluster-test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --reruns 1 --rerun-show-tracebacks --durations=25 --timeout=1800 $(SELECT) tests/cluster

# --- the test cluster, for people (root only; see tests/cluster/README.md)

cluster-up cluster-down: $(VENV)/.made
	$(BIN)/python -m tests.cluster $(subst cluster-,,$@)

HOST ?= login
cluster-shell: $(VENV)/.made
	$(BIN)/python -m tests.cluster shell $(HOST)

benchmark: $(VENV)/.test
	$(BIN)/python -m benchmarks.cli
	$(BIN)/python -m benchmarks.images
	$(BIN)/python -m benchmarks.launch
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.stragglers
	$(BIN)/python -m benchmarks.recovery --write # as root; an hour

clean:
	rm -rf $(VENV) build dist *.egg-info
