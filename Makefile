# Linux, Python >= 3.11 and pip are all that must be there. `make` alone lists the targets.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= pinned
CONFIG ?= configs/tiny.yaml
RANKS  ?= 2
ARGS   ?=

# Tools run as modules: where the environment looks into PYTHON's packages, a tool that is already
# there gets no script in .venv/bin.
PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check --quiet
STAMP := $(VENV)/.installed-$(TORCH)

ifeq ($(filter $(TORCH),pinned skip),)
$(error TORCH must be `pinned` or `skip`, got `$(TORCH)`)
endif

# One thread per rank: the ranks share the cores, and the bits of a matrix product depend on the
# number of threads.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env train test lint oldest torchtitan format docs wheel clean

help: ## list the targets and settings
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nSettings, as in `make train RANKS=4`:\n'
	@printf '  %-26s %s\n' \
		'CONFIG=configs/tiny.yaml' 'what `make train` trains' \
		'RANKS=2' 'processes of `make train` on this machine' \
		'ARGS=' 'more arguments for train.py (key.path=value) or pytest (-k NAME)' \
		'TORCH=skip' 'keep the torch that is there instead of the version in constraints.txt' \
		'VENV=.venv PYTHON=python3' 'the environment, and the Python that makes it'

env: $(STAMP) ## make the environment in .venv

train: $(STAMP) ## train CONFIG on RANKS ranks of this machine
	$(PY) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) train.py $(CONFIG) $(ARGS)

test: lint ## run all checks: lint, tests, and the package in environments of its own
	$(PY) -m pytest $(ARGS)
	$(if $(ARGS),,$(MAKE) --no-print-directory oldest torchtitan)

oldest: $(STAMP) ## check sdist and wheel with the oldest versions, in an empty environment
	.ci/oldest $(PY) $(PYTHON)

torchtitan: ## run the tests of shardmuon in torchtitan, in an environment of their own
	.ci/torchtitan $(PYTHON)

lint: $(STAMP) ## run ruff, mypy and import-linter
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

format: $(STAMP) ## format the code and fix what ruff can fix
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

docs: $(STAMP) ## build the documentation site into site/
	$(PY) -m mkdocs build --strict

wheel: $(STAMP) ## build the wheel into dist/
	$(PY) -m build --wheel

clean: ## remove the environment, builds and caches (not runs/)
	rm -rf .venv .venv-* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted install starts again. Other stamps go first, so
# that a change of TORCH installs again. torch is named with its version from the first command
# on: no later step may bring another one.
$(VENV)/.installed-pinned: pyproject.toml constraints.txt
	@echo 'Installing into $(VENV) (minutes the first time, for torch) ...'
	@$(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	@$(PIP) install --requirement constraints.txt
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

# An environment that has torch is kept; else a new one looks into PYTHON's own packages.
$(VENV)/.installed-skip: pyproject.toml
	@echo 'Installing into $(VENV), with the torch that is there ...'
	@$(PY) -c 'import torch' 2>/dev/null \
		|| $(PYTHON) -m venv --system-site-packages $(VENV)
	@$(PY) -c 'import torch' 2>/dev/null || { echo >&2 \
		'TORCH=skip: neither $(VENV) nor $(PYTHON) itself (outside its virtual environment) has torch.' \
		'To use an activated environment: make TORCH=skip VENV="$$VIRTUAL_ENV"'; exit 1; }
	@rm -f $(VENV)/.installed-*
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
		> $(VENV)/torch-there.txt
	@$(PIP) install --constraint $(VENV)/torch-there.txt --editable '.[dev]' || { echo >&2 \
		"TORCH=skip: could not install beside $$(cat $(VENV)/torch-there.txt);" \
		"pyproject.toml says which versions will do."; exit 1; }
	@touch $@
