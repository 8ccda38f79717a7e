# Every target sets up what it needs: a virtual environment in .venv with the project installed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo picture test test-slow lint types bench format clean

demo: $(READY)
	$(BIN)/cpsbs demo

picture: $(READY)
	$(BIN)/python examples/picture.py docs/demo.svg cpsbs demo
	$(BIN)/python examples/picture.py docs/compare.svg cpsbs compare --temperature 0.5 --rows 16 \
		"He forgot his keys on the kitchen table."

# A worker a core, with one thread each: torch's threads would wait for each other.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow -rs

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.conditional_poisson \
		--json benchmarks/results/conditional_poisson.json --readme README.md
	$(BIN)/python -m benchmarks.decoding --json benchmarks/results/decoding.json

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)
