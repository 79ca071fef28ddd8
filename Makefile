# `make demo` and `make test` need python3 (with venv), make and a C++ compiler; `make lint` needs node's npm too.
PYTHON ?= python3
PYTEST_ARGS ?=
RESULTS ?= docs/results
VENV := .venv
BIN := $(VENV)/bin
BUF := tools/node_modules/.bin/buf
# Stamps say what an environment holds, so that a second call installs nothing.
RUNTIME := $(VENV)/.aengine-runtime
DEV := $(VENV)/.aengine-dev
CUDA := $(VENV)/.aengine-cuda
NODE := tools/node_modules/.package-lock.json
WHEELS := build/wheels
COMMA := ,

.DEFAULT_GOAL := help
.PHONY: help demo demo-grpc test test-slow test-levels test-triton test-all lint benchmarks gpu wheels protos node clean

help: ## this list
	@sed -n "s/^\([a-z-]*\):.*## /  make \1\t/p" $(firstword $(MAKEFILE_LIST))

demo: $(RUNTIME) ## stream a continuation of a prompt from the bundled model
	@$(BIN)/python examples/demo.py

demo-grpc: $(RUNTIME) ## the same through a server and a client
	@$(BIN)/python examples/demo_grpc.py

# Each worker takes whole files of tests, so that what a file starts is started once.
TEST_WORKERS ?= auto
# One that dies ends the run: its tests would only be run again, and kill the next one.
IN_WORKERS := -n $(TEST_WORKERS) --maxprocesses 4 --dist loadfile --max-worker-restart 0

test: $(DEV) ## run the tests but for the slow ones; PYTEST_ARGS="-k name" for some of them
	@$(BIN)/python -m pytest $(IN_WORKERS) -m "not slow" $(PYTEST_ARGS)

test-all: $(DEV) ## run all tests, in CI with some of the slow ones
	@$(BIN)/python -m pytest $(IN_WORKERS) $(PYTEST_ARGS)

test-slow: $(DEV) ## run the slow ones: more seeds of what is random, and floods
	@$(BIN)/python -m pytest $(IN_WORKERS) -m slow $(PYTEST_ARGS)

# What depends on the kernels: tokens of runner and engine against Transformers, and decoding. `make test` runs them at the best level. Levels
# that are not in CANONICAL have the bits of others, which `make test` compares.
LEVEL_TESTS := tests/models/test_families.py::test_all_at_once tests/runner/test_merged_adapters.py::test_drawn_tokens tests/runner/test_greedy.py tests/runner/test_decoding_runner.py tests/engine/test_demo_model.py tests/engine/test_decoding.py
test-levels: $(DEV) ## run the tests of the model at the build levels of the CPU kernels that have bits of their own, and without them
	@$(MAKE) --no-print-directory test-level-torch $$($(BIN)/python -c 'from aengine.kernels.cpu.compiler import CANONICAL, supported_levels; print(*(f"test-level-{one.value}" for one in supported_levels()[1:] if one in CANONICAL))')

test-level-%: $(DEV)
	@echo "AENGINE_CPU_LEVEL=$*"
	@AENGINE_CPU_LEVEL=$* $(BIN)/python -m pytest -q $(LEVEL_TESTS) -k "not trio and not torch_native"

# What compiles for a GPU without one, also with the Triton that the oldest supported torch brings.
OLDEST_TRITON := triton-3.6.0
COMPILE_TESTS := tests/kernels/test_triton_ops_compile.py tests/attention/test_triton_compiles.py
test-triton: $(DEV) $(VENV)/$(OLDEST_TRITON) ## compile the Triton kernels with the oldest Triton that is supported, too
	@AENGINE_TEST_TRITON=$(CURDIR)/$(VENV)/$(OLDEST_TRITON) $(BIN)/python -m pytest -q $(COMPILE_TESTS)

$(VENV)/triton-%: | $(DEV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target $@ triton==$*

lint: $(DEV) $(NODE) ## check format, style, types, the schema and that generated code is up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BUF) lint
	$(BUF) format --diff --exit-code
	tools/breaking.sh
	$(BIN)/python tools/generate.py --check

benchmarks: $(RUNTIME) ## print what scheduling and sampling cost per step, and serving per token
	@$(BIN)/python -m tools.bench.scheduling
	@$(BIN)/python -m tools.bench.sampling
	@$(BIN)/python -m tools.bench.serving
	@$(BIN)/python -m tools.bench.clients

# PYTHON as it is where that has torch, or where there is no device to install for; else the environment, with the extra cuda.
ifneq ($(filter gpu,$(MAKECMDGOALS)),)
HAS_TORCH := $(shell $(PYTHON) -c 'import importlib.util; print(importlib.util.find_spec("torch") and "yes" or "")')
FOR_GPU := $(if $(or $(HAS_TORCH),$(DRY_RUN)),,$(wildcard /dev/nvidia0))
endif
gpu: $(if $(FOR_GPU),$(CUDA)) ## on a CUDA device: benchmarks and tests in three stages of eight minutes into RESULTS=docs/results; DRY_RUN=1 tells what they are
	@$(if $(FOR_GPU),$(BIN)/python,$(PYTHON)) -m tools.gpu $(if $(DRY_RUN),--dry-run )$(RESULTS)

wheels: $(WHEELS)/.tools ## build the sdist and wheels with compiled kernels into dist/, and try the wheel of this machine without a compiler
	@rm -f dist/aengine_llm*
	@$(WHEELS)/bin/python -m tools.wheels.build dist
	@$(WHEELS)/bin/python -m tools.wheels.check dist/aengine_llm*_$$(uname -m).whl

protos: $(DEV) $(NODE) ## format protos/ and write aengine/v1/ from it
	$(BUF) format --write
	$(BIN)/python tools/generate.py

node: $(NODE) ## install buf and the Node client that some tests use

clean: ## remove the environment, node packages and caches
	rm -rf $(VENV) tools/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find aengine tests examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): pyproject.toml constraints.txt
	$(call install,.)
	@touch $@

$(DEV): pyproject.toml constraints.txt
	$(call install,'.[dev]')
	@touch $@ $(RUNTIME)

$(CUDA): pyproject.toml constraints.txt
	$(call install,'.[dev$(COMMA)cuda]')
	@touch $@ $(DEV) $(RUNTIME)

$(NODE): tools/package.json tools/package-lock.json
	npm ci --prefix tools --no-fund --no-audit
	@touch $@

$(WHEELS)/.tools: tools/wheels/requirements.txt
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip install --disable-pip-version-check --quiet -r $<
	@touch $@

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; set PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) -m tools.prebuild cache & $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e $(1); status=$$?; wait; exit $$status
endef
