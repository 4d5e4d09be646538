# Everything runs in .venv, which is made here with pip from pyproject.toml and constraints.txt.
PYTHON ?= python3
WORKERS ?= 2

venv := .venv
bin := $(venv)/bin
ready := $(venv)/.installed
verl_venv := .venv-verl
verl_ready := $(verl_venv)/.installed
verl_needs := tests/integrations_verl/requirements.txt
# make test-titan TITAN=0.3.0 has another environment, with another torch.
TITAN ?= 0.2.2
titan_venv := .venv-titan-$(TITAN)
titan_needs := tests/hosts_titan/requirements-$(TITAN).txt
titan_ready := $(titan_venv)/.installed
docs_ready := .venv-docs/.installed
pytest := OMP_NUM_THREADS=1 $(bin)/python -m pytest
no_gpu := not gpu and not multi_gpu

# Planning, rollouts, losses and whole steps of small models: under 90 seconds on two cores.
QUICK := tests/unit/test_plan.py tests/unit/test_plan_packing.py \
  tests/unit/test_forest.py tests/unit/test_rollouts.py tests/unit/test_boundary.py \
  tests/unit/test_house.py tests/unit/test_config.py tests/unit/test_changes.py \
  tests/integration/test_logprobs.py
FUZZ_SECONDS ?= 600
OLD ?= main~1
# make test-slow PART=2/4 runs the second quarter of the lane.
PART ?= 1/1
TRL ?= trl==1.16.0
trl_ready := .venv-trl/.installed

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-slow test-ranks test-quick fuzz compare figures check format mutate test-gpu test-wheel test-versions test-trl test-verl test-titan clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(ready)  ## a GRPO loop on the CPU, every gradient dense and shared
	@$(bin)/python examples/grpo.py --compare --examples 32 --group 16 --updates 1 --steps 25 --log ""

docs: $(docs_ready)  ## the site of the documentation, in site/
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo "written: site/index.html"

test: $(ready)  ## every kind of test that needs no GPU; CONTRIBUTING.md bounds its time
	@$(pytest) -m "$(no_gpu) and not slow and not examples" -n $(WORKERS) --dist worksteal

test-slow: $(ready)  ## what make test leaves out: endurance, compilers, more cases
	@$(pytest) -m "$(no_gpu) and slow and not ranks" -n $(WORKERS) --dist worksteal --part $(PART)

test-ranks: $(ready)  ## the slow tests of several ranks
	@$(pytest) -m "$(no_gpu) and slow and ranks" -n $(WORKERS) --dist worksteal --part $(PART)

test-quick: $(ready)  ## the fast tests alone, for every save
	@$(pytest) -q -m "$(no_gpu) and not slow" -n $(WORKERS) --dist worksteal $(QUICK)

fuzz: $(ready)  ## random models, batches and plans from fresh seeds, for FUZZ_SECONDS
	@$(bin)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) --seed $$(date +%s)

compare: $(ready)  ## steps of the working tree beside those of a commit, bit for bit; OLD=main~1
	@$(bin)/python scripts/compare_commits.py $(OLD)

figures: $(ready)  ## the schedules of docs/concepts/phases.md
	@$(bin)/python scripts/plot_schedule.py

mutate: $(ready)  ## which seeded changes of the source the tests find; hours, less with WORKERS
	@$(bin)/python scripts/mutate.py --workers $(WORKERS) --out mutate-output

check: $(ready)  ## lint, formatting, types, every example of the documentation
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/pyright
	@found=$$(PATH="$(CURDIR)/$(bin):$$PATH" pyright --verifytypes forkpoint --ignoreexternal) || \
	  { echo "$$found" | grep -A 2 'error:\|completeness'; exit 1; }
	@$(pytest) -q tests/unit/test_docs.py tests/unit/test_house.py -n $(WORKERS) --dist worksteal

format: $(ready)  ## rewrite files as `make check` wants them
	@$(bin)/ruff check --fix .
	@$(bin)/ruff format .

test-gpu: $(ready)  ## the tests that need one CUDA device
	@$(bin)/python -m pytest -m gpu

test-verl: $(verl_ready)  ## the engines for verl, beside verl's own; 6 minutes, in .venv-verl
	@OMP_NUM_THREADS=1 $(verl_venv)/bin/python -m pytest tests/integrations_verl

test-titan: $(titan_ready)  ## the models of torchtitan; TITAN=0.3.0 for another version
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(titan_venv)/bin/python -m pytest tests/hosts_titan

test-wheel:  ## build sdist and wheel, and use the wheel in an empty environment
	@$(PYTHON) scripts/test_wheel.py

test-versions: $(ready)  ## the tests under oldest and newest torch and transformers; hours
	@bash scripts/test_versions.sh

# An environment of its own: TRL brings a dozen libraries that nothing else needs. Its stamp says
# which version is there, and another one takes its place: make test-trl TRL=trl==1.15.0
test-trl: $(trl_ready)  ## the trainers of TRL beside stock TRL; 10 minutes
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-trl/bin/python -m pytest -q tests/integrations_trl

ifneq ($(shell cat $(trl_ready) 2>/dev/null),$(TRL))
.PHONY: $(trl_ready)
endif
$(trl_ready): pyproject.toml constraints.txt
	@rm -f $@
	@$(PYTHON) -m venv .venv-trl
	@.venv-trl/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable ".[trl]" "$(TRL)" accelerate peft datasets hypothesis \
	  pillow prefix-grouper==0.0.1.post1 pytest pytest-timeout
	@echo "$(TRL)" > $@

clean:  ## remove the environment and everything built or cached
	rm -rf $(venv) .venv-trl .venv-verl .venv-titan-* .venv-docs .venvs build dist site mutate-output .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is named by constraints.txt from the start, so that nothing pulls another build of it.
$(ready): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	  "forkpoint needs Python 3.11 or newer, and $(PYTHON) is %d.%d; name another with " \
	  "make PYTHON=python3.11" % v[:2])'
	@echo "Installing forkpoint into $(venv) (once, a few minutes)"
	@$(PYTHON) -m venv $(venv)
	@$(bin)/python -m pip install --quiet --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable ".[dev]"
	@touch $@

$(verl_ready): pyproject.toml $(verl_needs)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 13) else \
	  "verl needs Python 3.11 or 3.12 here, and $(PYTHON) is %d.%d; name another with " \
	  "make PYTHON=python3.12 test-verl" % v[:2])'
	@echo "Installing verl and forkpoint into $(verl_venv) (once, a few minutes)"
	@$(PYTHON) -m venv $(verl_venv)
	@$(verl_venv)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  --requirement $(verl_needs)
	@$(verl_venv)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation verl==0.9.1 TransferQueue==0.1.10 --editable .
	@touch $@

# The site needs no torch: docstrings are read, and no module is imported.
$(docs_ready): pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-docs
	@$(PYTHON) -c 'import tomllib; f = open("pyproject.toml", "rb"); \
	  print(*tomllib.load(f)["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  > .venv-docs/needs.txt
	@.venv-docs/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  --constraint constraints.txt --requirement .venv-docs/needs.txt
	@touch $@

# torch is the one of the requirements if they name it, and else that of constraints.txt.
$(titan_ready): pyproject.toml constraints.txt $(titan_needs)
	@$(PYTHON) -m venv $(titan_venv)
	@cat $(titan_needs) constraints.txt | grep -v "^#" | awk -F == '!seen[$$1]++' \
	  > $(titan_venv)/constraints.txt
	@$(titan_venv)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  --constraint $(titan_venv)/constraints.txt --editable ".[dev]"
	@$(titan_venv)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  --no-deps --requirement $(titan_needs)
	@touch $@
