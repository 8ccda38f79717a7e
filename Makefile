# Every target sets up what it needs: a virtual environment in VENV with the project installed,
# in the versions of CONSTRAINTS.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo toy picture test test-slow test-newest lint types bench dist docs notebooks format clean

demo: $(READY)
	$(BIN)/cpsbs demo

# Policy gradients on a toy: reward against steps, with and without replacement.
toy: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.policy_gradient

picture: $(READY)
	$(BIN)/python examples/picture.py docs/demo.svg cpsbs demo
	$(BIN)/python examples/picture.py docs/compare.svg cpsbs compare --temperature 0.5 --rows 16 \
		"He forgot his keys on the kitchen table."

# One worker per core with one thread each: torch's threads would wait for each other.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow -rs

# The same tests with the newest releases of what we depend on.
test-newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=constraints-newest.txt

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

# The wheel and the source distribution, and the wheel tried out in empty environments.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m tests.distribution.install dist/*.whl --constraints $(CONSTRAINTS)
	ls -l dist

# The documentation site, in ./site; a warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# With one thread, because the number of threads changes the last digits.
notebooks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/execute.py

bench: $(READY)
	$(BIN)/python -m benchmarks.conditional_poisson \
		--json benchmarks/results/conditional_poisson.json --readme docs/cost.md
	$(BIN)/python -m benchmarks.decoding --json benchmarks/results/decoding.json

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .venv-newest .mypy_cache .pytest_cache .ruff_cache .hypothesis dist site

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	touch $(READY)
