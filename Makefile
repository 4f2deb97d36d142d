# make train    train the embedded policy on AIME-style problems (TRAIN_ARGS="num_steps=10" changes settings)
# make test     run the fast tests (TEST_ARGS="tests/rl -q" passes other arguments to pytest)
# make test-all run every test
# make test-gpu-compile  compile for GPUs that are not there, in .venv-gpu (4.4 GB)
# make lint     check style, format and types
# make docs     build the documentation in site/, in an environment of its own (.venv-docs)
# Each sets up what it needs in .venv; a second call installs nothing.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
TRAIN_ARGS ?=
# Two processes, each with the tests of whole files: most of the time goes into compiling, which uses one core. Files run in
# the order of the tree, so that the longest file is not the last.
TEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
# uv takes a fifth of pip's time; it does not read pip's configuration, where pip takes over. Python compiles what is imported,
# a fifth of the files of all libraries, and keeps it.
INSTALL = $(BIN)/uv pip install --python $(BIN)/python $(1) || $(BIN)/python -m pip install --no-compile $(1)
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all test-gpu-compile lint docs site
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	$(BIN)/areal-train --exp=aime $(TRAIN_ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow" $(TEST_ARGS)

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(TEST_ARGS)

test-gpu-compile:
	$(MAKE) test-all VENV=.venv-gpu EXTRAS=dev,gpu TEST_ARGS=tests/compile_only_gpu

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

docs:
	$(MAKE) site VENV=.venv-docs EXTRAS=dev,docs

site: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.installed: pyproject.toml | $(BIN)/uv
	$(call INSTALL,--quiet --editable .)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/uv
	$(call INSTALL,--quiet --editable ".[$(EXTRAS)]")
	@touch $@ $(VENV)/.installed

$(BIN)/uv: | $(BIN)/python
	$(BIN)/python -m pip install --quiet uv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"{sys.executable} is Python {v[0]}.{v[1]}; areal_jax needs 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
