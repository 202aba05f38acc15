# Everything below runs from a clean clone: the first target that needs it builds .venv from the
# pinned requirements. Only Python 3.11 or newer, make and git have to be there.
#
#   make PYTHON=/path/to/python3.12 test     another interpreter
#   make test ARGS="-k config"               more arguments for the tool behind a target

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
KEEP ?=

# The first interpreter that runs and is new enough (a pyenv shim may exist and yet not run).
FIND_PYTHON = for python in $(if $(PYTHON),"$(PYTHON)",python3.11 python3 python3.12 python3.13); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	  python=; \
	done; \
	if [ -z "$${python:-}" ]; then \
	  echo "make: Python 3.11 or newer is needed: install it, or name it with make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi

.PHONY: help
help: ## Say what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1  \2/p' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(STAMP) ## Two simulated servers, the router and a load that ramps up and down (KEEP=1 leaves it running)
	@$(BIN)/loadtest demo $(if $(filter-out 0,$(KEEP)),--keep) $(ARGS)

.PHONY: test
test: $(STAMP) ## All tests
	@$(BIN)/python -m pytest $(ARGS)

.PHONY: check
check: $(STAMP) ## Lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: bench
bench: $(STAMP) ## What the relay costs per request and per chunk, on this machine
	@$(BIN)/loadtest bench $(ARGS)

.PHONY: policy-table
policy-table: $(STAMP) ## Every rule against both single servers, simulated; goes on where it was (runs/policy-table.jsonl)
	@$(BIN)/python -m loadtest.policy_table $(ARGS)

.PHONY: format
format: $(STAMP) ## Format the code and mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: lock
lock: $(STAMP) ## Pin requirements/ anew from pyproject.toml (ARGS=--upgrade for the newest)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and \
	  "make lock: the oldest Python we support makes the pins: make clean lock PYTHON=python3.11")'
	@$(BIN)/python -m venv $(VENV)/lock
	@$(VENV)/lock/bin/python -m pip install -q --disable-pip-version-check pip-tools==7.6.2
	@compile() { CUSTOM_COMPILE_COMMAND="make lock" $(VENV)/lock/bin/pip-compile -q --strip-extras --allow-unsafe \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host $(ARGS) "$$@" pyproject.toml; }; \
	compile -o requirements/run.txt; \
	compile --extra test -c requirements/run.txt -o requirements/dev.txt

.PHONY: clean
clean: ## Remove .venv and everything built
	rm -rf $(VENV) build dist .coverage htmlcov .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find router loadtest tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Built aside and stamped last, so that an interrupted install is started over and never used.
$(STAMP): requirements/dev.txt pyproject.toml
	@$(FIND_PYTHON); \
	echo "Setting up $(VENV) with $$("$$python" -V) (once)"; \
	rm -rf $(VENV); \
	"$$python" -m venv $(VENV) || { \
	  echo "make: $$python cannot create a virtual environment (Debian and Ubuntu: apt-get install python3-venv)" >&2; \
	  exit 1; \
	}
	@$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/dev.txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)
