# make demo   trains NeuCLIP on rendered pairs on this machine's CPU
# make test   ruff, mypy and the tests; make test-all adds the slow ones
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all check clean

demo: $(VENV)/.installed
	$(BIN)/python train.py demo

test: check
	$(BIN)/python -m pytest -q

test-all: check
	$(BIN)/python -m pytest -q -m "not gpu"

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements.txt
	$(BIN)/python -m pip install -q --no-deps -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q ruff mypy types-PyYAML open_clip_torch "moto[server]>=5" "s3fs>=2024.6" "aiohttp>=3.10"
	touch $@

clean:
	rm -rf $(VENV) .cache runs build *.egg-info
