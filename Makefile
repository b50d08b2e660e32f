# Everything happens in .venv, which any target creates. PYTHON picks the interpreter (3.10-3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
INSTALLED := $(VENV)/installed

.PHONY: install demo test test-slow test-all bench sanitize lint wheel clean

install: $(INSTALLED)

# torch first: an isolated build of the extension would download a second one.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch setuptools wheel ninja numpy
	$(PIP) --no-build-isolation --editable '.[bench,dev,ray]'
	@$(BIN)/python -c "from grpo_kernels.backends import report; print(report())"
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m grpo.demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

test-all: test test-slow

bench: $(INSTALLED)
	$(BIN)/python -m bench

# The subset search alone, under AddressSanitizer and UBSan, against enumeration.
sanitize:
	mkdir -p build
	$(CXX) -std=c++20 -O1 -g -Wall -Wextra -fsanitize=address,undefined \
		-fno-sanitize-recover=all -Icsrc csrc/group_subset_search.cpp \
		tests/native/group_subset_fuzz.cpp -o build/group_subset_fuzz
	build/group_subset_fuzz 10

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

wheel: $(INSTALLED)
	$(BIN)/pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info grpo_kernels/*.so $(VENV)
