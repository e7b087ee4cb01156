# Two commands do everything on a fresh machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check slow clean

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
	$(BIN)/deepdecode generate "def add(a, b):" --max-new-tokens 48

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/test_layers.py

test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
