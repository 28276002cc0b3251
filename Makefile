# On a machine with Python 3.11 or newer, git and make:
#
#   make demo       see the callback at work
#   make test       style, types, architecture and tests, in minutes
#   make ci         these, the packages and the long tests: all that continuous integration runs
#   make docs       build the site in build/docs, and look at it in a browser
#
# and `make check`, the first three of those checks, in seconds; `make quick ARGS=tests/solvers`, the tests of one room;
# `make benchmark`, which compares with other ways of saving memory; `make papers`, which prints the papers' tables beside ours;
# `make dist`, which builds the wheel and the sdist and tries them (ARGS=--full: each alone, with all that it asks for).
# The first of them creates .venv. `make demo` installs into it what the demo needs, every other one what all of them need;
# later ones do not install again.
#
#   PYTHON=python3.12        the interpreter that .venv is made with
#   TORCH='torch==2.12.*'    the torch to install (a plain `torch` may bring gigabytes of CUDA libraries along)
#   TRANSFORMERS='transformers==4.57.*'    the transformers to test with
#   WORKERS=2                processes that share the tests
#   ARGS='-k budget'         handed on to pytest, the demo or the benchmark

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.0
VENV ?= .venv
WORKERS ?= 2
DEMO ?= examples/byte_gpt/train.py
ARGS ?=

BIN := $(VENV)/bin
# Files are compiled when they are first imported, most of them never: to compile all takes longer than to download them. What is
# compiled is kept, whatever the shell says: many processes import the same.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet

.PHONY: demo check test quick ci docs dist benchmark papers format install clean FORCE

demo: $(VENV)/.demo
	$(BIN)/python $(DEMO) $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check quick

quick: install
	$(BIN)/python -m pytest -m "not long and not slow and not gpu" -n $(WORKERS) --dist worksteal $(ARGS)

ci: install
	$(MAKE) --jobs=2 check dist ARGS=
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --dist worksteal $(ARGS)

docs: install
	rm -rf build/docs
	$(BIN)/python -m pytest tests/docs/test_site.py $(ARGS)
	@echo "the site: build/docs/index.html; pictures of four pages: build/docs-screenshots"

dist: install
	$(BIN)/python -m scripts.dist $(ARGS)

benchmark: install
	$(BIN)/python benchmarks/peers.py $(ARGS)

papers: install
	$(BIN)/python -m benchmarks.papers.checkmate $(ARGS)
	$(BIN)/python -m benchmarks.papers.kumar $(ARGS)
	$(BIN)/python -m benchmarks.papers.kusumoto $(ARGS)
	$(BIN)/python -m benchmarks.papers.hiremate $(ARGS)
	$(BIN)/python -m benchmarks.papers.offload $(ARGS)

format: install
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

install: $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist docs/generated *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer was found: name one, as in 'make PYTHON=/path/to/python test'"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, and this is " + sys.version)'
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

# Hold a requirement; rewritten only when that changes, so that only then it is installed again.
$(VENV)/.torch-requirement: REQUIREMENT = $(TORCH)
$(VENV)/.transformers-requirement: REQUIREMENT = $(TRANSFORMERS)
$(VENV)/.torch-requirement $(VENV)/.transformers-requirement: FORCE | $(VENV)/.created
	@printf '%s\n' '$(REQUIREMENT)' | cmp -s - $@ || printf '%s\n' '$(REQUIREMENT)' > $@

# Torch first: what comes later finds it there and does not choose one itself.
$(VENV)/.torch: $(VENV)/.torch-requirement
	@echo "installing $(TORCH)"
	$(PIP) '$(TORCH)'
	@touch $@

# What a user installs, with the pictures and the report.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "installing the project"
	$(PIP) --editable '.[pictures,report]'
	@touch $@

# pytorchcv asks for torchvision, which it needs for none of the networks used here.
$(VENV)/.installed: $(VENV)/.torch $(VENV)/.transformers-requirement pyproject.toml
	@echo "installing the project and its tools"
	$(PIP) --editable '.[dev]' '$(TRANSFORMERS)'
	$(PIP) --no-deps pytorchcv
	@touch $(VENV)/.demo $@
