# make demo   trains a small CLIP on rendered pairs
# make test   ruff, mypy and the tests; make test-all adds the slow ones
# make test-gpu  the tests marked gpu on GPUs; without a GPU, some of them on the CPU
# make docs   docs/ as pages in build/site
# make peers  the other loaders of tools/benchmark_data.py and benchmark_streaming.py
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-gpu check docs peers clean

demo: $(VENV)/.installed
	$(BIN)/python train.py demo

test: check
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
	$(BIN)/python -m pip install -r requirements.txt
	$(BIN)/python -m pip install -q --no-deps -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

# MosaicML streaming's pins (numpy, transformers) contradict this project's, so it comes without its dependencies
peers: $(VENV)/.installed-dev
	$(BIN)/python -m pip install -q --no-deps mosaicml-streaming==0.13.0
	$(BIN)/python -m pip install -q boto3 Brotli catalog paramiko python-snappy xxhash zstd

clean:
	rm -rf $(VENV) .cache runs build *.egg-info
