# make demo    the quickstart, from nothing to a trained model, on a real swarm of three engines on this machine
# make test    the gate: what a change has to pass, with the time of each suite; SUITES='fast trainer' picks suites
# make test-all  everything, with a new seed for randomized tests
# make chaos   faults on a real swarm, and a table of what each cost; ONLY='a rank hangs' picks rows, without it all are tried, for hours; DOCS=1 writes docs/explanation/reliability.md
# make contract  the suite of that name alone: what every launcher keeps, on each of the six; docs/reference/launchers.md is its table
# make soak    the same faults at random on one run, MINUTES=30 long; SEED=7 draws those of an earlier run again
# make check   format, lint, types, architecture, unit tests, docs: under a minute
# make refresh writes all generated pages and golden files again, except speed.md, the pictures and the table of faults
# make bench   speed against other tools, into build/bench.json; ONLY=name runs one, DOCS=1 writes docs/reference/speed.md too
# make site    the documentation as a site, into build/site; broken links and pages that are in no list fail it
# make pictures  the screenshots in docs/images, of two real runs on a swarm of four engines on this machine
# Each target installs what it needs, is safe to repeat, and works in a fresh clone.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PINS := -c requirements/image.txt -c requirements/test.txt
LISTS := pyproject.toml requirements/image.txt requirements/test.txt
# What is imported is compiled then, and kept, whatever the environment says; to compile all that is installed takes a minute.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
# The system's packages and Python's come side by side.
PREPARE := @$(MAKE) --no-print-directory --jobs=2 system
# A range would take the newest build, with gigabytes of CUDA libraries that a test on CPUs has no use for.
TORCH ?= torch==2.13.0

.PHONY: demo test test-all contract chaos soak check refresh bench site pictures format clean
.PHONY: system install install-docs install-train install-test

demo:
	$(PREPARE) install
	@VENV=$(VENV) TORCH=$(TORCH) MAKE="$(MAKE)" sh examples/demo.sh

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

# From scratch, since a second build would not repeat the warnings about pages that have not changed.
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

# What the lab needs from the system. Without root, or without apt, the lab says itself what is missing.
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

# determined comes alone, into a folder of its own: it asks for an older requests, which pip would tell of ever after, and for 30
# packages of which we need three, which the extra `test` names.
$(VENV)/.installed-test: $(VENV)/.torch $(LISTS)
	$(PIP) $(PINS) -e .[train,test]
	$(PIP) $(PINS) --no-deps --upgrade --target $(VENV)/determined determined
	@touch $@

clean:
	rm -rf build $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find swarmtrain tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
