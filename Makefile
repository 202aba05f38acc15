# Everything below runs from a clean clone: the first target that needs it builds .venv from the
# pinned requirements. Only Python 3.11 or newer, make and git have to be there.
#
#   make PYTHON=/path/to/python3.12 test     another interpreter
#   make test ARGS="-k config"               more arguments for the tool behind a target
#   make test JOBS=0                         one test after the other, in one process

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
KEEP ?=
JOBS ?= auto
FUZZ_SECONDS ?= 60
FUZZ_EXAMPLES ?= 300
SOAK_SECONDS ?= 600

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
test: $(STAMP) ## All tests, as many at a time as there are cores (JOBS=0: one)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

.PHONY: check
check: $(STAMP) ## Lint, format and types; whether what is generated is stale
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m deploy.grafana.dashboard --check
	$(BIN)/python -m tests.reference

.PHONY: bench
bench: $(STAMP) ## What the relay costs per request and per chunk, on this machine
	@$(BIN)/loadtest bench $(ARGS)

.PHONY: scale
scale: $(STAMP) ## How many streams, slow readers and large bodies one process carries, on this machine
	@$(BIN)/loadtest scale $(ARGS)

.PHONY: policy-table
policy-table: $(STAMP) ## Every rule against both single servers, simulated; goes on where it was (runs/policy-table.jsonl)
	@$(BIN)/python -m loadtest.policy_table $(ARGS)

.PHONY: dashboard
dashboard: $(STAMP) ## Write the Grafana dashboard's JSON from its code
	@$(BIN)/python -m deploy.grafana.dashboard

.PHONY: reference
reference: $(STAMP) ## Write REFERENCE.md from the code
	@$(BIN)/python -m tests.reference --write

.PHONY: chaos
chaos: $(STAMP) ## Kill, stop, drain and confuse the servers under load (about 3 minutes)
	@$(BIN)/python -m tests.chaos.run $(ARGS)

.PHONY: soak
soak: $(STAMP) ## Short requests for 10 minutes: nothing may grow (SOAK_SECONDS=600)
	@$(BIN)/python -m tests.chaos.soak --seconds $(SOAK_SECONDS) $(ARGS)

# atheris is for Linux and few versions of Python: without it the same targets are run unguided.
.PHONY: fuzz
fuzz: $(STAMP) ## Fuzz the parsers (FUZZ_SECONDS=60 each) and the whole router (FUZZ_EXAMPLES=300)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/fuzz.txt \
	  || echo "make: atheris cannot be installed here: the targets run without its guidance" >&2
	@$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(ARGS)
	@FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest -q -o timeout=0 tests/fuzz/test_router.py

.PHONY: matrix
matrix: $(STAMP) ## The reported cases on this and, where installed, on other proxies
	@$(BIN)/python -m tests.matrix $(ARGS)

.PHONY: compose-test
compose-test: $(STAMP) ## The stack of compose.yaml on a Docker engine: up, used, broken, stopped, up again (minutes)
	@$(BIN)/python -m pytest -vs -o timeout=0 tests/compose/up.py $(ARGS)

# Each with its configuration in deploy/gateways/. SMG=, HAPROXY= and NGINX= name programs off PATH.
.PHONY: gateways
gateways: $(STAMP) ## smg, HAProxy and nginx, as far as installed, in front of two pairs (a minute each)
	@$(BIN)/python -m tests.gateways $(ARGS)

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

# A finding that does not concern us goes here by its id, each with its reason in a comment above.
AUDIT_IGNORED :=

.PHONY: audit
audit: $(STAMP) ## Known vulnerabilities in the pinned requirements (asks PyPI; ARGS="-s osv" asks OSV)
	@[ -x $(VENV)/audit/bin/pip-audit ] || { \
	  $(BIN)/python -m venv $(VENV)/audit && \
	  $(VENV)/audit/bin/python -m pip install -q --disable-pip-version-check pip-audit==2.10.1; \
	} || { rm -rf $(VENV)/audit; echo "make audit: nothing was audited: pip-audit cannot be installed" >&2; exit 1; }
	@found="$$(mktemp)"; trap 'rm -f "$$found"' EXIT; \
	if $(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off \
	  -r requirements/run.txt -r requirements/dev.txt $(AUDIT_IGNORED:%=--ignore-vuln %) $(ARGS) >"$$found" 2>&1; \
	then sed -n '/^No known vuln/p' "$$found"; \
	elif grep -q '^Found ' "$$found"; then sed '/^WARNING/d' "$$found" >&2; exit 1; \
	else echo "make audit: nothing was audited, the advisories cannot be read from here: $$(tail -n 1 "$$found" | cut -c1-200)" >&2; exit 1; \
	fi

.PHONY: clean
clean: ## Remove .venv and everything built
	rm -rf $(VENV) build dist .coverage htmlcov .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find router loadtest tests deploy -name __pycache__ -type d -prune -exec rm -rf {} +

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
