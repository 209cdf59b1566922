# Set-up is shared by all targets and quick when repeated. Variables, with their defaults:
#   make test PYTHON=python3.12        the Python that .venv is made with (3.11 to 3.13)
#   make test TORCH_VERSION=2.13.0     the torch that is installed
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu    where from, if not pip's own index
#   make test WORKERS=8                processes that the tests run in, about 1 GB each
#   make test VENV=.venv-oldest CONSTRAINTS=.ci/oldest.txt        another environment, with other versions
PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
TORCH_INDEX ?=
VENV ?= .venv
CONSTRAINTS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
MADE := $(VENV)/.made-with-$(notdir $(PYTHON))
INSTALLED := $(VENV)/.installed-with-torch-$(TORCH_VERSION)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS))

.PHONY: help setup demo test test-all check report clean requirements

help:
	@echo "make demo      decode real prompts with the shipped pair, then compare all methods"
	@echo "make test      run the tests"
	@echo "make test-all  run the slow ones too"
	@echo "make check     ruff and pyright"
	@echo "make report    compile all kernels for three generations of GPUs: registers, spills, tensor cores"
	@echo "make clean     remove what was built and installed here"

demo: setup
	$(BIN)/heavypath demo

# The tests are many small operations, whose threads would only wait for each other.
test test-all: export OMP_NUM_THREADS ?= 1

test: setup
	$(BIN)/python -m pytest --numprocesses $(WORKERS)

test-all: setup
	$(BIN)/python -m pytest --numprocesses $(WORKERS) -m ""

check: $(VENV)/.checkers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

report: setup
	$(BIN)/python bench/compile_report.py

clean:
	rm -rf .venv .venv-* .editable build dist *.egg-info .pytest_cache .ruff_cache
	find kernels speculative tests bench -name __pycache__ -prune -exec rm -rf {} +

setup: $(INSTALLED)

requirements:
	@command -v git >/dev/null || { echo "git is missing: apt-get install git" >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: apt-get install python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "Python 3.11, 3.12 or 3.13 is needed, $(PYTHON) is `$(PYTHON) --version`" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) lacks the venv module: apt-get install python3-venv" >&2; exit 1; }

$(MADE): | requirements
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch comes first and by version: anything that merely asks for "torch" might fetch another one.
$(INSTALLED): $(MADE) pyproject.toml setup.py $(CONSTRAINTS)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	$(PIP) 'setuptools>=77'
	$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

$(VENV)/.checkers: $(INSTALLED)
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
