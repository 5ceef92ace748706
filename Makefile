.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

help:              ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

$(VENV)/.setup: setup.py setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "setuptools>=77" "cython>=3.0.11" "numpy>=1.26"
	$(BIN)/pip install -q --no-build-isolation -e ".[test,lint]"
	touch $@

setup: $(VENV)/.setup  ## a virtual environment with phasewise, built from this tree

build: setup       ## compile the kernels again after a change
	$(BIN)/python setup.py -q build_ext --inplace

test: build        ## run the tests: make test ARGS="-k rmsnorm"
	$(BIN)/pytest $(ARGS)
