# make demo    run the quickstart, from installation to a trained model, on a real swarm of three engines on this machine
# make test    run the gate: the suites that every change must pass; SUITES='fast trainer' selects suites
# make test-all  run all suites, with a new seed for randomized tests
# make chaos   inject faults on a real swarm and print a table of their costs; ONLY='a rank hangs' selects rows, all rows take hours; DOCS=1 writes docs/explanation/reliability.md
# make contract  run the contract tests of all six launchers; docs/reference/launchers.md is their table
# make soak    inject random faults into one run for MINUTES=30; SEED=7 repeats the faults of an earlier soak test
# make check   check formatting, lint rules and types, and run the suite `fast`: about a minute
# make refresh rewrite all generated pages and golden files, except speed.md, the pictures and the table of faults
# make bench   compare the speed with other tools, into build/bench.json; ONLY=name runs one benchmark, DOCS=1 writes docs/reference/speed.md too
# make gpu     run tests/gpu: check training on this machine's GPUs, and measure its speed; DEVICE=cpu runs the same on tiny models,
#              ONLY=equivalence runs one module, DOCS=1 writes the GPU's section of docs/reference/speed.md
# make site    build the documentation site into build/site; broken links, and pages that are in no list, fail the build
# make pictures  take the screenshots in docs/images, of real runs on a swarm of four engines on this machine
# Each target installs what it needs, can be repeated safely, and works in a fresh clone.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PINS := -c requirements/image.txt -c requirements/test.txt
LISTS := pyproject.toml requirements/image.txt requirements/test.txt
# Modules are compiled on first import (this variable might prevent it), because compiling all installed packages takes a minute.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
# System packages and Python packages are installed in parallel.
PREPARE := @$(MAKE) --no-print-directory --jobs=2 system
# A version range would select the newest build, with gigabytes of CUDA libraries that tests on CPUs do not use.
TORCH ?= torch==2.13.0

.PHONY: demo test test-all contract chaos soak check refresh bench gpu site pictures format clean
.PHONY: system install install-docs install-train install-test

# With CI=true the demo fails where its lab cannot start.
demo: install
	@$(BIN)/swarmtrain demo build/demo --yes $(if $(filter true,$(CI)),--lab)

test:
	$(PREPARE) install-test
	@$(BIN)/python tests/suites.py $(SUITES)

test-all:
	$(PREPARE) install-test
	@$(BIN)/python tests/suites.py --all $(SUITES)

contract:
	$(PREPARE) install-test
	@$(BIN)/python tests/suites.py --all contract

chaos:
	$(PREPARE) install-test
	@SWARMTRAIN_CHAOS=$(or $(ONLY),all) SWARMTRAIN_DOCS=$(DOCS) $(BIN)/python tests/suites.py chaos
	@$(if $(DOCS),,cat build/chaos.md)

soak:
	$(PREPARE) install-test
	@SWARMTRAIN_SOAK=$(or $(MINUTES),30) SWARMTRAIN_SEED=$(SEED) $(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 tests/lab/soak.py

check: install-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tests/suites.py fast

refresh: install-test
	REFRESH=1 $(BIN)/python -m pytest -q tests/golden
	$(BIN)/python docs/reference/generate.py
	REFRESH=1 $(BIN)/python -m pytest -q tests/docs tests/mistakes tests/unit/test_import.py

bench:
	$(PREPARE) install-train
	@$(BIN)/python -m benchmarks $(ONLY) $(if $(DOCS),--docs)

# pytest and hypothesis are what tests/conftest.py needs of install-test.
gpu: install-train
	@mkdir -p build
	@$(PIP) --quiet $(PINS) pytest hypothesis
	@$(BIN)/python -m pytest -q -o python_files='rows_*.py' tests/gpu$(if $(ONLY),/rows_$(ONLY).py) --device $(or $(DEVICE),cuda) --rows build/gpu.jsonl
	@$(if $(DOCS),$(BIN)/python tests/gpu/speed_section.py build/gpu.jsonl)

# The build starts from scratch, because a second build would not repeat the warnings about unchanged pages.
site: install-docs
	@rm -rf build/site
	@$(BIN)/python -m sphinx --fail-on-warning --fresh-env --quiet --doctree-dir build/site-cache docs build/site
	@echo "the site is in build/site; its first page is build/site/index.html"

pictures:
	$(PREPARE) install-test
	@$(BIN)/python docs/images/take_screenshots.py

format: install-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# System packages for the lab. Without root or apt, the lab prints which ones are missing.
system:
	@sh requirements/system.sh

install: $(VENV)/.installed
install-docs: $(VENV)/.installed-docs
install-train: $(VENV)/.installed-train
install-test: $(VENV)/.installed-test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(BIN)/python
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.installed: $(BIN)/python $(LISTS)
	$(PIP) $(PINS) -e .
	@touch $@

$(VENV)/.installed-docs: $(BIN)/python $(LISTS)
	$(PIP) $(PINS) -e .[docs]
	@touch $@

$(VENV)/.installed-train: $(VENV)/.torch $(LISTS)
	$(PIP) $(PINS) -e .[train]
	@touch $@

# determined is installed into a separate folder, without dependencies: it requires an older version of requests, about which pip would
# warn from then on, and 30 packages, of which the tests need three (listed in the extra `test`).
$(VENV)/.installed-test: $(VENV)/.torch $(LISTS)
	$(PIP) $(PINS) -e .[train,test]
	$(PIP) $(PINS) --no-deps --upgrade --target $(VENV)/determined determined
	@touch $@

clean:
	rm -rf build $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find swarmtrain tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
