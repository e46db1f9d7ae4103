# Every target that needs the virtual environment sets it up first; `make setup` says what it does.
PYTHON ?= python3
PYTEST_ARGS ?=
DEMO_ARGS ?=
FUZZ_SECONDS ?= 60
SOAK_STEPS ?= 20000
# Tests that run at a time, three on two cores: many wait for faults and timeouts. Those of ranks that
# are timed closely never run beside each other.
TEST_JOBS ?= 3

bin := .venv/bin
pytest = $(bin)/python -m pytest -n $(TEST_JOBS) --no-loadscope-reorder
cxx_sources = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-quick test-slowest sanitize fuzz faults soak lint format build docs bench gpu-check clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r target what; \
	do printf '  make %-12s %s\n' "$$target" "$$what"; done

setup: ## .venv with torch, Horovod built for it, and this package
	@command -v $(PYTHON) >/dev/null || \
	{ echo "error: no $(PYTHON): apt-get install python3 python3-venv python3-dev" >&2; exit 2; }
	@$(PYTHON) tools/bootstrap.py

demo: setup ## train digits between two hosts of a slow network, dense and sparse: demo-output/
	@$(bin)/python -m tools.demo $(DEMO_ARGS)

test: setup ## the tests (PYTEST_ARGS="-k name" for some of them)
	@$(pytest) $(PYTEST_ARGS)

test-quick: setup ## those that are not marked slow: something of everything, in three minutes
	@$(pytest) -m "not slow" $(PYTEST_ARGS)

test-slowest: setup ## the tests, and which twenty took longest
	@$(pytest) --durations=20 --durations-min=0 $(PYTEST_ARGS)

sanitize: setup ## tests/ops and tests/wire with a native library that checks addresses and undefined behaviour
	@CXXFLAGS="-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all" \
	$(bin)/python setup.py -q build --build-base build/sanitized --build-lib build/sanitized/lib
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(bin)/python -m pytest -o pythonpath="build/sanitized/lib ." tests/ops tests/wire $(PYTEST_ARGS)

fuzz: setup ## what came over a wire under libFuzzer, FUZZ_SECONDS in all (needs clang++)
	@$(bin)/python -m tools.fuzz --seconds $(FUZZ_SECONDS)

faults: setup ## every fault in every phase of a training, on real ranks
	@HVD_SPARSE_FAULTS=all HVD_SPARSE_ABORTS=2000 $(bin)/python -m pytest -s tests/faults \
	tests/transports/test_faults.py tests/transports/test_gloo.py tests/transports/test_processes.py \
	tests/adapter/test_exit.py tests/benchmarks/test_drivers.py $(PYTEST_ARGS)

soak: setup ## train for SOAK_STEPS steps, or rounds for HOURS, on 4 ranks among faults; books, memory, ends
	@mkdir -p build/bench
	@$(bin)/python -m benchmarks.soak $(if $(HOURS),--hours $(HOURS) --json build/bench/soak.json,--steps $(SOAK_STEPS))

lint: setup ## ruff, mypy and clang-format, as checks
	@$(bin)/ruff check
	@$(bin)/ruff format --check
	@$(bin)/mypy
	@$(bin)/clang-format --dry-run --Werror $(cxx_sources)

format: setup ## rewrite the sources as lint wants them
	@$(bin)/ruff check --fix
	@$(bin)/ruff format
	@$(bin)/clang-format -i $(cxx_sources)

build: setup ## sdist and, made from it in isolation, a manylinux wheel: dist/
	@rm -rf build/dist && mkdir -p dist
	@$(bin)/python -m build --outdir build/dist
	@mv build/dist/*.tar.gz dist/
	@PATH="$(CURDIR)/$(bin):$$PATH" $(bin)/auditwheel repair --wheel-dir dist build/dist/*.whl

docs: setup ## the documentation as a site, in build/site, with every link checked
	@$(bin)/python -c "import mkdocs, mkdocstrings" 2>/dev/null || $(bin)/python -m pip install -q -e '.[docs]'
	@$(bin)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

bench: setup ## the benchmarks; results as JSON in build/bench/
	@mkdir -p build/bench
	@$(bin)/python -m benchmarks.encode --json build/bench/encode.json
	@$(bin)/python -m benchmarks.allreduce --quick --json build/bench/allreduce.json
	@$(bin)/python -m benchmarks.sparse_linear --json build/bench/sparse_linear.json
	@$(bin)/python -m benchmarks.weak_scaling --json build/bench/weak_scaling.json \
	--plot build/bench/weak_scaling.png
	@rm -f build/bench/*.jsonl # what a run that is stopped goes on from

gpu-check: setup ## with a CUDA device and CuPy: tests, timings, counters; rows in build/gpu
	@rm -rf build/lease # rows of another time, with which a phase counts as done
	@$(bin)/python -m tools.gpu_lease --out build/gpu

clean: ## what was built, but not .venv
	@rm -rf build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rm -f hvd_sparse/*.so
	@find hvd_sparse benchmarks tools examples tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and .venv (built Horovod wheels stay in ~/.cache/hvd_sparse)
	@rm -rf .venv
