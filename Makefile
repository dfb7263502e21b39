# One command each; every target sets up what it needs in .venv inside this tree.
#   make demo    train a small Llama on this machine, as it ships and patched, and compare
#   make test    C++ tests under sanitizers, then all Python tests
# LIGER_CUDA=AUTO|ON|OFF chooses the CUDA back end (AUTO: when nvcc is found).
VENV := .venv
PYTHON := $(VENV)/bin/python
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
TEST_THREADS ?= 2

.PHONY: setup build demo test test-cpp test-python consumers bench docs lint wheel clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements-dev.txt scripts/system-packages
	scripts/system-packages
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	touch $@

# Builds against the torch in the environment and installs the tree in place; a second run compiles only what changed.
build: setup
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .

demo: build
	$(VENV)/bin/liger demo

test: lint test-cpp test-python

test-cpp: setup
	cmake --preset asan
	cmake --build --preset asan
	ctest --preset asan

# Environments of other projects' released packages; without one (no network, say) its tests are skipped and say so.
consumers: setup
	-scripts/consumer-env --all

test-python: build consumers
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(TEST_THREADS)

bench: build
	$(VENV)/bin/liger bench

# The documentation as a site, in build/site; a broken link is an error.
docs: setup
	$(PYTHON) scripts/docs

lint: setup
	$(VENV)/bin/ruff check .
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
	$(PYTHON) -m pytest -q -p no:cacheprovider tests/test_layout.py
	$(PYTHON) scripts/readme-tables --check

wheel: setup
	$(PYTHON) -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist .
	ls -l dist

clean:
	rm -rf build dist demo
