# make demo      trains a small CLIP model on rendered pairs
# make test      runs ruff, mypy and the fast tests; make test-all runs the slow tests too
# make test-gpu  runs the tests marked gpu on a GPU; without a GPU, it runs some of them on the CPU
# make docs      builds the pages of docs/ in build/site
# make peers     installs MosaicML streaming, which tools/benchmark_data.py and benchmark_streaming.py measure too
# make clean     deletes .venv, .cache, runs, build and *.egg-info
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# without --no-compile, pip would take a minute to compile every module; Python compiles modules when it imports them
INSTALL := $(BIN)/python -m pip install -q --no-compile

.PHONY: demo test test-fast test-all test-gpu check docs peers clean

demo: $(VENV)/.installed
	$(BIN)/python train.py demo

# the checks and the tests run at the same time, because mypy takes half a minute on one core
test:
	$(MAKE) --no-print-directory --jobs=2 check test-fast

test-fast: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

test-all: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not gpu and not soak"

test-gpu: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m gpu --device=$$($(BIN)/python -c \
		"import torch; print('cuda' if torch.cuda.is_available() else 'cpu')")

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev
	$(BIN)/mkdocs build

$(VENV)/.installed: requirements.txt pyproject.toml
	@echo "installing into $(VENV): a few GB, which takes minutes"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -r requirements.txt -e .
	touch $@

$(VENV)/.installed-dev: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -r requirements.txt -e ".[dev]"
	touch $(VENV)/.installed $@

# MosaicML streaming requires other versions of numpy and transformers than this project, so it is installed without its
# dependencies; the next line installs those that it needs here
peers: $(VENV)/.installed-dev
	$(INSTALL) --no-deps mosaicml-streaming==0.13.0
	$(INSTALL) boto3 Brotli catalog paramiko python-snappy xxhash zstd

clean:
	rm -rf $(VENV) .cache runs build *.egg-info
