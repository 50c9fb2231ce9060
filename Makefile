# Every target sets up what it needs: a virtual environment in .venv, installed once and again when its inputs change.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NEWEST := $(VENV)/newest
DOCS_READY := $(VENV)/.docs-ready
JOBS ?= auto
CORES := env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc# which answers 1 where OMP_NUM_THREADS is 1
JOBS_CPU ?= $(shell expr $$($(CORES)) + 1)# one more than cores: some tests wait for servers and timeouts
JOBS_GPU ?= $(shell $(CORES))# processes that share the GPU: most of their time is spent compiling, a core each
GPU ?= h200# the folder under results/

.PHONY: help demo test cpu-test compile-test compile-test-configs compile-test-cuda compile-test-newest lint format docs wheel server gpu-test gpu-test-turing sanitize sanitize-cuda bench e2e tables clean

help:  ## say what there is
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

demo: $(READY)  ## fetch a small model, let it write on this machine, and say which kernels served and how fast
	$(BIN)/flashkernel demo

test: cpu-test compile-test  ## all tests that need no GPU

cpu-test: $(READY)  ## references, torch backends, Triton under its interpreter, errors, command line
	$(BIN)/python -m pytest -n $(JOBS_CPU) --dist worksteal

compile-test: $(READY)  ## every kernel for every GPU it claims, without that GPU
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "compile and not every_arch and not every_config"

compile-test-configs: $(READY)  ## the sizes and tiles of benchmarks beside those of compile-test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "compile and every_config"

compile-test-cuda: $(READY)  ## CUDA C++ kernels for every architecture, by NVRTC and nvcc: no spills
	$(BIN)/python -m pytest -n $(JOBS) -m every_arch

compile-test-newest: $(NEWEST)/.ready  ## one kernel of every kind, with the newest triton that pyproject.toml allows
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest -n $(JOBS) -m "compile and newest"

lint: $(READY)  ## style, types, and tables in the docs that match results/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/flashkernel tables --check

format: $(READY)  ## fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_READY)  ## the documentation as a site, in build/site; a broken link or reference fails
	$(BIN)/python docs/assemble.py build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

wheel: $(READY)  ## the wheel, in build/wheel, with a check of what is in it
	$(BIN)/python tools/check_wheel.py build/wheel

server:  ## what the container image installs, in build/server: the same script
	sh tools/install_server.sh build/server

gpu-test:  ## the whole matrix on this machine's GPU, with the Python that is there: in several processes, then what times
	@$(PYTHON) -c 'import xdist' 2>/dev/null || \
	  { echo "gpu-test runs in several processes and needs pytest-xdist: $(PYTHON) -m pip install pytest-xdist"; exit 1; }
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
	  $(PYTHON) -m pytest -m 'gpu and not alone' -n $(JOBS_GPU) --dist worksteal
	$(PYTHON) -m pytest -m 'gpu and alone' -n 0

gpu-test-turing:  ## the CUDA C++ kernels as a T4 executes them (PTX for sm_75), on this machine's GPU: the whole matrix
	FLASHKERNEL_CUDA_ARCH=75 OMP_NUM_THREADS=1 \
	  $(PYTHON) -m pytest -m gpu -n $(JOBS_GPU) --dist worksteal tests/test_matrix.py -k "cuda-cuda and not bfloat16"

SANITIZED := rms_norm cross_entropy softmax sum weighted_sum rope swiglu attention linear append_kv decode_attention \
  --dtype float16 --case everything --case odd --case plain --case mask-causal --case interleaved --case gpt-oss
SANITIZER := compute-sanitizer --report-api-errors no --error-exitcode 9 --kernel-name-exclude kernel_substring=cudnn

# cuDNN, run for comparison, has hazards of its own.
sanitize:  ## compute-sanitizer over a few cases and a random call of every kernel family
	$(SANITIZER) --tool memcheck $(PYTHON) -m flashkernel check $(SANITIZED)
	$(SANITIZER) --tool memcheck $(PYTHON) -m flashkernel check --random --seed 1
	$(SANITIZER) --tool racecheck $(PYTHON) -m flashkernel check $(SANITIZED) --backend triton --backend cuda

# Parts of it: make sanitize-cuda SANITIZE_ARCHS=75 SANITIZE_TOOLS="racecheck" SANITIZE_OPS="attention linear"
SANITIZE_ARCHS ?= own 75# architectures that kernels are built for: this GPU's own, and a T4's
SANITIZE_TOOLS ?= racecheck initcheck memcheck synccheck# the slowest first
SANITIZE_OPS ?= $(SANITIZED_CUDA)
SANITIZED_CUDA := attention attention_varlen decode_attention paged_attention linear rotary_attention rope softmax \
  weighted_sum logsumexp max sum
SANITIZED_attention := everything plain uneven-dims mask-causal several-tiles gpt-oss dropout
SANITIZED_attention_varlen := several-tiles gpt-oss empty-sequences
SANITIZED_decode_attention := everything one gpt-oss paged-split int8-paged-split
SANITIZED_paged_attention := everything one several
SANITIZED_linear := everything plain some-rows
SANITIZED_rotary_attention := plain interleaved several-tiles
SANITIZED_rope := q-k interleaved odd-pairs
SANITIZED_softmax := plain odd mask-causal
SANITIZED_weighted_sum := plain odd
SANITIZED_logsumexp := plain odd
SANITIZED_max := plain odd
SANITIZED_sum := plain odd
SANITIZE_RUNS = $(foreach tool,$(SANITIZE_TOOLS),$(foreach op,$(SANITIZE_OPS),\
  $(foreach arch,$(SANITIZE_ARCHS),sanitize/$(arch)/$(tool)/$(op))))
part = $(word $(1),$(subst /, ,$@))# of the name of a run

# initcheck does not see what a kernel writes by TMA, as cuBLAS and cuDNN do on Hopper, nor what an excluded kernel writes:
# it reports torch's kernels that read such results. So the expected results are computed on the CPU, and the GPU runs our
# kernels, fills and copies alone. A check fills new tensors with NaN, which shows where a kernel reads them too early;
# what initcheck adds are reads outside of tensors, in memory that torch's allocator holds and memcheck allows.
sanitize-cuda:  ## the four tools of compute-sanitizer over the CUDA C++ kernels, built for this GPU and for sm_75: in several processes
	@$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS_GPU) --output-sync=target $(SANITIZE_RUNS)

.PHONY: $(SANITIZE_RUNS)
$(SANITIZE_RUNS):
	@echo "$@"
	@FLASHKERNEL_CUDA_ARCH=$(filter-out own,$(call part,2)) OMP_NUM_THREADS=1 $(SANITIZER) --tool $(call part,3) \
	  $(PYTHON) -m flashkernel check $(call part,4) --backend cuda --dtype float16 \
	  $(addprefix --case ,$(SANITIZED_$(call part,4))) $(if $(filter initcheck,$(call part,3)),--expected-on cpu)

bench:  ## measure every operator on this machine's GPU and keep the figures
	$(PYTHON) -m flashkernel bench --save results/$(GPU)

e2e:  ## measure whole models on this machine's GPU, in the engine and in Transformers, and keep the figures
	$(PYTHON) -m flashkernel e2e --save results/$(GPU)

tables: $(READY)  ## write the figures of results/ into the docs
	$(BIN)/flashkernel tables --write

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(NEWEST)/.ready: $(READY)
	sh tools/setup.sh $(VENV) newest
	touch $@

$(DOCS_READY): $(READY)
	sh tools/setup.sh $(VENV) docs
	touch $@

$(READY): pyproject.toml constraints.txt tools/setup.sh
	PYTHON=$(PYTHON) sh tools/setup.sh $(VENV)
	touch $@
