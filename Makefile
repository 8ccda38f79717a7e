# Every target sets up what it needs: a virtual environment in VENV with the project installed,
# in the versions of CONSTRAINTS.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PAGE := src/cpsbs/explore/static/page.js
NPM := $(shell command -v npm)

.PHONY: demo toy picture page screenshots test test-slow test-browser test-newest lint types bench dist docs \
	notebooks format clean

demo: $(READY)
	$(BIN)/cpsbs demo

# Policy gradients on a toy: reward against steps, with and without replacement.
toy: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.policy_gradient

picture: $(READY)
	$(BIN)/python examples/picture.py docs/demo.svg cpsbs demo
	$(BIN)/python examples/picture.py docs/compare.svg cpsbs compare --temperature 0.5 --rows 16 \
		"He forgot his keys on the kitchen table."

# The page of cpsbs explore, from web/. Without Node.js all but the page works.
ifdef NPM
page: $(PAGE)

# The pictures of the page in the documentation.
screenshots: $(READY) $(PAGE)
	$(BIN)/python docs/screenshots.py
else
page:
	@echo "npm is not installed: cpsbs explore has no page, and its tests are skipped" >&2
endif

# One worker per core with one thread each: torch's threads would wait for each other.
test: $(READY) page
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow -rs

# The page in a real browser, and its unit tests. On Debian, Chromium is installed if it is missing.
test-browser: $(READY) $(PAGE)
	cd web && npm test --silent
	@command -v chromium chromium-browser google-chrome >/dev/null || \
		(apt-get update -qq && apt-get install -y -qq chromium fonts-dejavu-core >/dev/null)
	$(BIN)/python -m pytest -m browser tests/browser

# The same tests with the newest releases of what we depend on.
test-newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=constraints-newest.txt

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
ifdef NPM
	@$(MAKE) --no-print-directory web/node_modules/.ready
	cd web && npm run --silent lint
endif

types: $(READY)
	$(BIN)/mypy
ifdef NPM
	@$(MAKE) --no-print-directory web/node_modules/.ready
	cd web && npm run --silent types
endif

# The wheel and the source distribution, and the wheel tried out in empty environments.
dist: $(READY) page
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
ifdef NPM
	@$(MAKE) --no-print-directory web/node_modules/.ready
	cd web && npm run --silent format
endif

clean:
	rm -rf .venv .venv-newest .mypy_cache .pytest_cache .ruff_cache .hypothesis dist site
	rm -rf web/node_modules web/.build $(dir $(PAGE))

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	touch $(READY)

web/node_modules/.ready: web/package.json web/package-lock.json
	cd web && npm ci --silent --no-audit --no-fund
	touch $@

$(PAGE): web/node_modules/.ready web/build.mjs $(wildcard web/src/*) $(wildcard web/src/panels/*)
	cd web && npm run --silent build
