# `make demo` and `make test` do all the set-up themselves, on a fresh Debian machine with make and python3; the second time they are quick.
#
#   make demo      every pair of installed frameworks, converted, with proof that nothing was copied
#   make test      all that CI runs: the tests, the linters, a short demo
#   make bench     ours against what a user would call today; ARGS="numpy --json" are handed on
#   make lint      ruff, mypy, stubtest, cython-lint
#   make soak      long loops and foreign libraries
#   make test-gpu  what needs an NVIDIA GPU
#   JOBS=0 runs the tests in one process, for a debugger
#   make deps      Debian packages; make clean removes all that was made here

PYTHON ?= python3
JOBS   ?= 2
ARGS   ?=

# What Debian has to bring. Whoever needs a driver adds its package here.
DEBIAN := gcc libc6-dev python3-dev python3-venv libvulkan1 mesa-vulkan-drivers vulkan-validationlayers glslang-tools \
          pocl-opencl-icd mesa-opencl-icd

# Proved against, never required: what cannot be had is left out, and its tests skip.
FRAMEWORKS := torch jax ml_dtypes apache-tvm-ffi cuda-bindings vulkan pyopencl

VENV := .venv
RUN  := $(VENV)/bin/python
PIP  := $(RUN) -m pip --disable-pip-version-check -qq install --constraint constraints.txt

# cython-lint starts pycodestyle by its name
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PYTHONDONTWRITEBYTECODE := 1

SOURCES := setup.py pyproject.toml $(wildcard interop/*.pyx interop/*.pxd interop/core/*.pxi adapters/cuda/*.c)

.PHONY: demo test unit lint smoke bench soak test-gpu build deps clean
.DELETE_ON_ERROR:

demo: deps build
	@$(RUN) -m interop demo

test: deps unit lint smoke

unit: build
	$(RUN) -m pytest -m "not soak and not gpu" -n $(JOBS) $(ARGS)

lint: build
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy -p interop
	$(RUN) -m mypy.stubtest interop._core --allowlist tools/stubtest-allowlist.txt --ignore-unused-allowlist
	$(VENV)/bin/cython-lint interop

smoke: build
	timeout 60 $(RUN) -m interop demo --quick

bench: build
	@$(RUN) -m interop bench $(ARGS)

# pytest says 5 where it found nothing to run
soak: build
	$(RUN) -m pytest -m soak $(ARGS) || [ $$? -eq 5 ]

test-gpu: build
	$(RUN) -m pytest -m gpu $(ARGS) || [ $$? -eq 5 ]

build: $(VENV)/.built $(VENV)/.frameworks
	@sed 's/^/not installed: /; s/$$/ (to try again: rm $(VENV)\/.frameworks)/' $(VENV)/.frameworks

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "interop needs Python 3.11: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no venv could be made: run make deps as root"; exit 1; }
	@touch $@

$(VENV)/.tools: $(VENV)/.made constraints.txt
	@echo "installing the tools to build with"
	@$(PIP) setuptools Cython numpy
	@touch $@

$(VENV)/.built: $(VENV)/.tools $(SOURCES)
	@echo "building interop in place"
	@$(PIP) --no-build-isolation --editable ".[cli,dtypes,dev]"
	@touch $@

# One by one, so that one that cannot be had does not take the others with it
$(VENV)/.frameworks: $(VENV)/.tools constraints.txt
	@: > $@.part
	@for f in $(FRAMEWORKS); do echo "installing $$f"; $(PIP) $$f || echo $$f >> $@.part; done
	@mv $@.part $@

# One question to dpkg; what it does not know is missing too
deps:
	@command -v dpkg-query >/dev/null || { echo "no Debian here: interop needs a C compiler and Python's headers"; exit 0; }; \
	have=$$(dpkg-query --show --showformat='$${db:Status-Status} $${Package}\n' $(DEBIAN) 2>/dev/null | sed -n 's/^installed //p'); \
	missing=; for p in $(DEBIAN); do echo "$$have" | grep -qx "$$p" || missing="$$missing $$p"; done; \
	[ -z "$$missing" ] && exit 0; \
	line="apt-get install --yes --no-install-recommends$$missing"; \
	if [ "$$(id -u)" -eq 0 ]; then \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get -qq update && $$line || echo "could not install$$missing: going on with what is there"; \
	else echo "missing Debian packages, as root run: $$line"; fi

clean:
	rm -rf $(VENV) build dist *.egg-info interop/_core.c interop/_core.*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
