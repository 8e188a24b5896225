# `make demo` and `make test` do all their own set-up. Variables: PYTHON (interpreter, 3.11 or newer), VENV (folder of the
# environment), TORCH_INSTALL (auto, cpu or cuda), TORCH_VERSION, TORCH_CPU_INDEX; scripts/install.sh says what each means.
# `make TARGET ARGS="..."` hands arguments on.

SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
ARGS ?=
PYTHON_FILES := minisgl minisgl_worker tests scripts benchmarks examples
SETUP_FILES := pyproject.toml scripts/install.sh

export VENV
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH

.PHONY: help demo test lint unit gpu soak bench lines clean

help:
	@echo "make demo    set up, then ask the small model one question"
	@echo "make test    set up, then lint, types and all tests that need no GPU"
	@echo "make lint    ruff check, ruff format --check, mypy"
	@echo "make unit    the fast tests alone"
	@echo "make gpu     tests that need an NVIDIA GPU"
	@echo "make soak    random load with faults (ARGS for its length)"
	@echo "make bench   offline throughput of the small model on this machine (ARGS for other workloads)"
	@echo "make lines   lines of code per package against their budgets"
	@echo "make clean   remove the environment and all caches"

demo: $(VENV)/.minisgl-run
	@$(PY) examples/quickstart.py $(ARGS)

test: $(VENV)/.minisgl-dev
	@status=0; \
	$(MAKE) --no-print-directory lint || status=1; \
	$(PY) -m pytest tests/unit tests/process tests/worker $(ARGS) || status=1; \
	exit $$status

lint: $(VENV)/.minisgl-dev
	$(PY) -m ruff check $(PYTHON_FILES)
	$(PY) -m ruff format --check $(PYTHON_FILES)
	$(PY) -m mypy

unit: $(VENV)/.minisgl-dev
	$(PY) -m pytest tests/unit $(ARGS)

gpu: $(VENV)/.minisgl-dev
	$(PY) -m pytest tests/gpu $(ARGS)

soak: $(VENV)/.minisgl-dev
	$(PY) scripts/soak.py $(ARGS)

bench: $(VENV)/.minisgl-run
	$(PY) benchmarks/bench_offline.py --model smollm2 --cpu-workload $(ARGS)

lines:
	@$${PYTHON:-python3} scripts/count_lines.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(PYTHON_FILES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make set-up run once, and again when its inputs change.
$(VENV)/.minisgl-run: $(SETUP_FILES)
	@scripts/install.sh run
	@touch $@

$(VENV)/.minisgl-dev: $(SETUP_FILES)
	@scripts/install.sh dev
	@touch $@ $(VENV)/.minisgl-run
