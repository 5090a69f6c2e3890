# make train    install into .venv, then train a small GPT in FP8 and in bfloat16 on real text
# make check    ruff, pyright and the fast tests, 2 minutes on two cores: what to run after every change
# make test     every test that is not marked `slow`, 22 minutes on two cores, less when it is run again
# make test-all `make lint`, every test, and `make versions`, 90 minutes on two cores
# make versions tests marked `versions` under the other Python, where both 3.11 and 3.12 exist
# make hosts    models and trainers of other libraries in FP8, with the real packages, Python 3.12: 30 minutes on two cores
# make lint     ruff and pyright
# make docs     the site of docs/ in build/site, with the reference; a warning is an error
# make wheels   sources and wheels for other machines in dist/, checked: for each of Python 3.11 to 3.14 that is here
# make install  what all these need; they install it themselves where it is missing
# make clean    remove environments and built files; runs/ stays
#
# With --jobs 2, what one environment needs is downloaded while the kernels are compiled for the other; they are
# compiled once. PYTHON=/path/to/python chooses the interpreter, JAX="jax<0.13" the jax; ARGS="--preset gpt2-124m" goes
# to `python -m jax_fp8 train`.

.PHONY: train check test test-all versions hosts lint docs wheels install clean

# An interpreter is usable if it is 3.11 or newer and can make an environment and compile an extension.
USABLE := import ensurepip, os, sys, sysconfig, venv; \
    headers = os.path.join(sysconfig.get_path("include"), "Python.h"); \
    version = "%d.%d" % sys.version_info[:2]; \
    wanted = os.environ.get("WANTED", version); \
    usable = sys.version_info >= (3, 11) and version == wanted and os.path.exists(headers); \
    print(sys.executable) if usable else sys.exit(1)
find_python = $(shell for python in $(1); do "$$python" -c '$(USABLE)' 2>/dev/null && break; done)
find_version = $(shell for python in python$(1) "$$HOME"/.pyenv/versions/$(1).*/bin/python; do \
    WANTED=$(1) "$$python" -c '$(USABLE)' 2>/dev/null && break; done)

PYTHON := $(if $(filter undefined,$(origin PYTHON)),$(call find_python,python3.12 "$$HOME"/.pyenv/versions/3.12.*/bin/python python3.13 python3.11 python3),$(PYTHON))
VERSION := $(if $(PYTHON),$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
OTHERS := $(foreach version,$(filter-out $(VERSION),3.11 3.12),$(if $(call find_version,$(version)),$(version)))
COMPILER := $(shell command -v "$${CXX:-c++}" || command -v g++ || command -v clang++)
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -m 1 '^GPU')
JAX := jax<0.12
WHEEL_PYTHONS = $(foreach version,3.11 3.12 3.13 3.14,$(call find_version,$(version)))
SOURCES := jax_fp8 tests examples benchmarks csrc docs
# What `make check` runs: the innermost rooms, without the files that take longest.
FAST := tests/test_layout.py $(filter-out %attention.py %/test_moe.py %/test_dropout.py %/test_checkpoint_names.py, \
    $(wildcard tests/core/test_*.py tests/ops/test_*.py tests/nn/test_*.py))
# Files with a test marked `versions`: others need not be imported.
MARKED = $(shell grep --recursive --files-with-matches --include='test_*.py' 'mark\.versions' tests)
comma := ,
CUDA := $(if $(GPU),$(comma)cuda)
TARGET := $(if $(GPU),CUDA,for the CPU)
NVCC := $(or $(CUDACXX),$(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
# Without a GPU nothing runs the kernels. Where nvcc is, tests need them: they are compiled for the one architecture that
# tests compile programs for, and hardly optimized, which takes half the time.
NEVER_RUN := $(if $(GPU)$(if $(NVCC),,none),,--config-settings=cmake.define.JAX_FP8_KERNELS=ON \
    --config-settings=cmake.define.JAX_FP8_CUDA_ARCHITECTURES=90a-real \
    --config-settings=cmake.define.CMAKE_CUDA_FLAGS="-Xptxas -O1")
# One test process for every core that this one may use.
WORKERS := $(shell nproc 2>/dev/null || echo auto)
# What `pip install ".[test]"` would install, without the project itself.
REQUIREMENTS := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    names = sum(map(project["optional-dependencies"].get, ("train", "data", "test", "docs"$(if $(GPU),$(comma) "cuda"))), project["dependencies"]); \
    print(*(name for name in names if not name.startswith("jax_fp8")), sep="\n")
# Python compiles what is imported, a small part of what is installed. (To pip this says: do not compile.)
export PIP_NO_COMPILE := no
# And keeps it, whatever the shell says: otherwise every process that tests start compiles jax first, for seconds.
export PYTHONDONTWRITEBYTECODE :=
BUILD_INPUTS := pyproject.toml $(wildcard csrc/*.* csrc/device/*.*)
GPU_COMPILER := import jax; print(*("jax-cuda13-" + part + "==" + jax.__version__ for part in ("plugin", "pjrt")))
NO_PYTHON := needs Python 3.11 or newer with venv and headers (on Debian or Ubuntu: python3-venv and python3-dev); \
    install it, or say PYTHON=/path/to/python
NO_COMPILER := needs a C++ compiler (on Debian or Ubuntu: g++); install one, or set CXX=/path/to/compiler

train: .venv/.train
	.venv/bin/python -m jax_fp8 train --preset tiny --compare $(ARGS)

check: lint
	$(call run_tests,.venv,-m "not slow" $(FAST))

test: .venv/.test
	$(call run_tests,.venv,-m "not slow")

test-all: lint versions
	$(call run_tests,.venv)

versions: $(OTHERS:%=.venv-%/.test)
	$(foreach version,$(OTHERS),$(call run_tests,.venv-$(version),-m "versions and not slow" $(MARKED)))

hosts: .venv-hosts/.hosts
	$(foreach check,$(wildcard tests/hosts/*_check.py),$(call run_check,$(check)))

install: .venv/.test $(OTHERS:%=.venv-%/.test)

lint: .venv/.test
	.venv/bin/ruff check $(SOURCES)
	.venv/bin/ruff format --check $(SOURCES)
	.venv/bin/pyright

docs: .venv/.test
	.venv/bin/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --fresh-env docs build/site
	@echo "build/site/index.html is the first page"

wheels:
	$(if $(WHEEL_PYTHONS),,$(error $(NO_PYTHON)))
	$(if $(COMPILER),,$(error $(NO_COMPILER)))
	@echo "compiling the kernels for three architectures, then building and checking wheels: 6 minutes on two cores"
	$(firstword $(WHEEL_PYTHONS)) csrc/wheels.py $(WHEEL_PYTHONS)

clean:
	rm -rf .venv .venv-3.* .venv-hosts build dist .pytest_cache .ruff_cache jax_fp8/_kernels*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-hosts/.hosts: pyproject.toml
	$(if $(PYTHON),,$(error $(NO_PYTHON)))
	@echo "installing jax_fp8 and libraries with trainers into .venv-hosts: the first time takes minutes"
	$(PYTHON) -m venv .venv-hosts
	.venv-hosts/bin/python -m pip install --quiet --editable ".[hosts]" "$(JAX)"
	@touch $@

# The compiler for GPUs is only on the tests' path: where no GPU is, jax would complain about it in every other program.
define run_tests
	PYTHONPATH=$(1)/gpu-compiler $(1)/bin/python -m pytest -q -n $(WORKERS) --maxprocesses 4 --dist worksteal \
	    --durations 15 --durations-min 10 $(2)

endef

# A script with checks of another library.
define run_check
	.venv-hosts/bin/python $(1)

endef

# One environment: $(1) its folder, $(2) the interpreter, $(3) its version, $(4) empty for the first. What it holds is
# installed again when the C++ code or pyproject.toml changes; Python sources are used in place. What is there for tests
# is enough for training. The first compiles the kernels before it downloads what tests need, the others download before
# they link the first one's kernels.
define environment
$(1)/.made:
	$$(if $(2),,$$(error $(NO_PYTHON)))
	$$(if $(COMPILER),,$$(error $(NO_COMPILER)))
	$(2) -m venv $(1)
	@touch $$@

$(1)/.train: $(1)/.made $(BUILD_INPUTS)
	@echo "installing jax_fp8 into $(1) (Python $(3), $(TARGET)): the first time takes minutes"
	$(1)/bin/python -m pip install --quiet --editable ".[train$(CUDA)]" "$(JAX)" $(NEVER_RUN)
	@touch $$@

$(1)/.extension: $(1)/.made $(BUILD_INPUTS) $(if $(4),.venv/.extension | $(1)/.packages)
	@echo "installing jax_fp8 into $(1) (Python $(3), $(TARGET)): the first time takes minutes"
	$(1)/bin/python -m pip install --quiet --no-deps --editable . $(NEVER_RUN) $(if $(4),$(call same_library,$(VERSION)))
	@touch $$@

$(1)/.packages: $(1)/.made pyproject.toml $(if $(4),,| $(1)/.extension)
	@echo "installing what tests need into $(1) (Python $(3))"
	$(1)/bin/python -c '$(REQUIREMENTS)' > $(1)/requirements.txt
	$(1)/bin/python -m pip install --quiet --requirement $(1)/requirements.txt "$(JAX)"
	$(if $(4)$(GPU),,$(1)/bin/python -c '$(GPU_COMPILER)' | xargs $(1)/bin/python -m pip install --quiet --no-deps --upgrade --target $(1)/gpu-compiler)
	@touch $$@

$(1)/.test: $(1)/.extension $(1)/.packages
	@touch $(1)/.train $$@
endef

# The library that the build under Python $(1) left, where that had a compiler for it.
same_library = $$$$(ls -d "$$$$PWD"/build/cp$(subst .,,$(1))-*/libjax_fp8.a 2>/dev/null | sed 's/^/--config-settings=cmake.define.JAX_FP8_LIBRARY=/')

$(eval $(call environment,.venv,$(PYTHON),$(VERSION)))
$(foreach version,$(OTHERS),$(eval $(call environment,.venv-$(version),$(call find_version,$(version)),$(version),other)))
