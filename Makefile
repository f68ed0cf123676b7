# make demo   trains a small CLIP on rendered pairs
# make test   ruff, mypy and the tests; make test-all adds the slow ones
# make test-gpu  the tests marked gpu on GPUs; without a GPU, some of them on the CPU
# make docs   docs/ as pages in build/site
# make peers  the other loaders of tools/benchmark_data.py and benchmark_streaming.py
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# compiling every module takes a minute, and most are never imported; Python compiles those that are
INSTALL := $(BIN)/python -m pip install -q --no-compile

.PHONY: demo test test-fast test-all test-gpu check docs peers clean

demo: $(VENV)/.installed
	$(BIN)/python train.py demo

# at once, because mypy takes half a minute on one core
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
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -r requirements.txt -e .
	touch $@

$(VENV)/.installed-dev: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -r requirements.txt -e ".[dev]"
	touch $(VENV)/.installed $@

# MosaicML streaming's pins (numpy, transformers) contradict this project's, so it comes without its dependencies
peers: $(VENV)/.installed-dev
	$(INSTALL) --no-deps mosaicml-streaming==0.13.0
	$(INSTALL) boto3 Brotli catalog paramiko python-snappy xxhash zstd

clean:
	rm -rf $(VENV) .cache runs build *.egg-info
