# Two commands do everything on a fresh machine with Python >= 3.11:
#   make demo   real simulator data -> shards -> three trained, scored Decision Transformers (7 to 15 minutes on two cores)
#   make test   the CPU test suite
VENV ?= .venv
export VENV
BIN := $(VENV)/bin
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest

.PHONY: help demo dist docs test test-long test-lowest test-gpu test-rdma sanitize trust lint types format bench clean

help:
	@echo "make demo      collect MuJoCo data, convert, train three seeds, evaluate: tables and plots in demo/"
	@echo "make test      set up and run the CPU test suite"
	@echo "make test-long run the tests of half a minute and more that make test leaves out"
	@echo "make test-lowest  run the readers' tests with the lowest h5py, NumPy, pyarrow, ... allowed"
	@echo "make test-gpu  run the tests that need a CUDA GPU in the current Python"
	@echo "make test-rdma run the RDMA tests in a virtual machine with Soft-RoCE (Debian, Ubuntu; x86_64)"
	@echo "make sanitize  run the CUDA kernels' text on the CPU with every address checked (g++)"
	@echo "make trust     bit flips, kills of convert, train and actors, fuzzed HDF5 files"
	@echo "make lint      ruff, the order of rooms (import-linter), mypy --strict"
	@echo "make docs      the documentation with search: build/docs/index.html"
	@echo "make dist      wheel and sdist in dist/, checked, the wheel tried in a new environment"
	@echo "make bench     the CPU benchmarks convert and loader, JSON under docs/benchmarks/"
	@echo "make clean     remove $(VENV), caches and demo/"

# A step whose result is there is not repeated; `rm -r demo` begins anew.
GEAR := $(BIN)/gear-offline
demo:
	@.ci/setup demo
	@$(MAKE) --no-print-directory demo/seeds/sweep.md
	@$(MAKE) --no-print-directory demo/hopper.gif || echo "There is no film: docs/how-to/evaluate.md says what it takes."
	@echo
	@[ ! -f demo/hopper.gif ] || echo "The policy, asked for 3,000:        $(CURDIR)/demo/hopper.gif"
	@echo "Its curves, and what it achieves:   $(CURDIR)/demo/seeds/runs/s0/report.html"
	@echo "Three seeds:                        $(CURDIR)/demo/seeds/sweep.html"
	@echo "Where to go next:"
	@echo "  source $(BIN)/activate                                     gear-offline becomes a command"
	@echo "  gear-offline evaluate demo/seeds/runs/s0 --targets 2200,800     ask for something else"
	@echo "  gear-offline convert YOUR.hdf5 data/mine                        your own or D4RL's files"
	@echo "  gear-offline recipes ls                                         the paper's tasks, and others"

demo/hopper.hdf5:
	@mkdir -p demo
	$(GEAR) collect Hopper-v5 $@ --policy ars --quality mixed --steps 200000 --action-noise 0.05 \
		--gate 2000

demo/hopper: | demo/hopper.hdf5
	$(GEAR) convert demo/hopper.hdf5 $@
	$(GEAR) inspect $@

.PHONY: demo/seeds/sweep.md  # the command itself goes on where it was: one score first, then three
demo/seeds/sweep.md: | demo/hopper
	$(GEAR) sweep demo data.path=demo/hopper --seeds 1 --out demo/seeds
	$(GEAR) sweep demo data.path=demo/hopper --seeds 3 --out demo/seeds

demo/hopper.gif:
	$(GEAR) evaluate demo/seeds/runs/s0 --targets 3000 --episodes 10 --video $@

docs:
	@.ci/setup docs
	@$(BIN)/python -m mkdocs build --strict -q
	@echo "build/docs/index.html"

# Bytecode is kept: hundreds of processes import the package, and containers often ask for none.
# One thread a process: two processes share two cores, and threads that wait for each other's core
# made the tests of training several times slower.  Tests of threads set their own number.
test: export OMP_NUM_THREADS = 1
test:
	@.ci/setup test
	@$(PYTEST) -n 2 --dist worksteal -m "not long" --durations 30

test-long: export OMP_NUM_THREADS = 1
test-long:
	@.ci/setup test
	@$(PYTEST) -n 2 --dist worksteal -m long

# LOWEST_OPTIONS=--or-skip: where they cannot be installed, say so and go on.
test-lowest: export OMP_NUM_THREADS = 1
test-lowest:
	@.ci/setup test
	@$(BIN)/python -m tests.lowest build/lowest $(LOWEST_OPTIONS)
	@PYTHONPATH=build/lowest $(PYTEST) tests/test_sources_*.py

test-gpu:
	@python3 -m pytest -m gpu

# RDMA_OPTIONS=--or-skip: where the machine cannot be made, say why and go on.
# Collected here first: errors show early, and the emulated processor need not compile modules.
RDMA_TESTS := -m pytest -p pytest_timeout -p no:cacheprovider -m rdma -q --color=no \
	tests/test_exchange.py
test-rdma: export PYTEST_DISABLE_PLUGIN_AUTOLOAD = 1
test-rdma:
	@.ci/setup test
	@$(BIN)/python $(RDMA_TESTS) --collect-only >/dev/null
	@$(BIN)/python -m tests.soft_roce $(RDMA_OPTIONS) env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
		$(BIN)/python $(RDMA_TESTS)

# The libraries of the checks come first: they are a part of the kernels, not of Python.
SANITIZERS = $(foreach name,asan ubsan stdc++,$(shell g++ -print-file-name=lib$(name).so))
sanitize: export GEAR_OFFLINE_SANITIZE = 1
sanitize: export ASAN_OPTIONS = detect_leaks=0:detect_stack_use_after_return=0
sanitize: export UBSAN_OPTIONS = halt_on_error=1
sanitize:
	@.ci/setup test
	@LD_PRELOAD="$(SANITIZERS)" $(BIN)/python -m pytest -q -s tests/test_sampling_engine.py tests/test_gather.py tests/test_nodes_in_place.py

# Each program prints a JSON document of figures; it fails at the first broken promise.
trust:
	@.ci/setup test
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.flip_bits
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.kill_convert
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.kill_train
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.kill_grow
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.fuzz_hdf5 --runs 20000

lint:
	@.ci/setup test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=. $(BIN)/lint-imports --no-cache --no-logo
	@$(MAKE) --no-print-directory -j 2 types

types:
	@$(BIN)/mypy
	@$(BIN)/python -m tests.docs_examples build/examples
	@$(BIN)/mypy build/examples/*.py

format:
	@.ci/setup test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

dist:
	@.ci/setup test
	@.ci/dist

bench:
	@.ci/setup test
	@for name in convert loader; do $(BIN)/python -m benchmarks $$name --json > docs/benchmarks/$$name.json; done

clean:
	rm -rf $(VENV) demo build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
