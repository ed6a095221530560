# Every command of the project; people and CI call the same.
PYTHON3 ?= python3
# cpu or gpu: which ONNX Runtime to install.
RUNTIME ?= cpu
PYTHON := .venv/bin/python
BUF := npx --yes @bufbuild/buf@1.75.0
REPOSITORY ?= model_repository

# quick or full: how long `chaos` runs; and the file that its figures are appended to.
CHAOS ?= quick
CHAOS_REPORT ?= build/chaos.md

# The client of Docker, which needs BuildKit: built in up to version 22, the plugin buildx since 23.
DOCKER ?= docker
# Images of deploy/Dockerfile that `images` builds, further options of docker build, and the tag.
IMAGES ?= server client exporter enrich
BUILD_OPTIONS ?=
TAG ?= latest
DOCKER_BUILD = DOCKER_BUILDKIT=1 $(DOCKER) build --file deploy/Dockerfile

.PHONY: demo test test-all serve bench chaos drill interop images sbom lock wheels wheels-check lint format protos env clean

demo: env ## install, export, serve, send requests, compare with PyTorch
	$(PYTHON) -m scripts.demo --repository $(REPOSITORY)

test: env ## run the tests that show that it works, in five minutes on two cores
	$(PYTHON) -m pytest -m "not chaos and not thorough"

test-all: env ## run the tests that `test` leaves out: large models, every encoder, other programs; in 15 minutes
	$(PYTHON) -m pytest -m "thorough and not chaos" --durations=30

serve: env ## serve the models of model_repository/, exporting the demo models first
	$(PYTHON) -m scripts.export_demo_models --repository $(REPOSITORY)
	$(PYTHON) -m server --model-repository $(REPOSITORY)

bench: env ## measure the service beside its ceilings; BENCH=--quick for a short run
	$(PYTHON) -m benchmarks run $(BENCH)

chaos: env ## measure overload, floods, drains, the drill and a soak: CHAOS=quick in about 10 minutes, full in about 60
	CHAOS=$(CHAOS) CHAOS_REPORT=$(CHAOS_REPORT) $(PYTHON) -m pytest -m "chaos or not chaos" -n0 -s tests/chaos

interop: env ## run KServe's SDK against a server; installs it under build/
	$(PYTHON) -m scripts.interop --repository $(REPOSITORY)

drill: env ## the part of chaos with several servers
	CHAOS=$(CHAOS) CHAOS_REPORT=$(CHAOS_REPORT) $(PYTHON) -m pytest -n0 -s tests/chaos/test_drill.py

images: ## build the images; IMAGES, TAG and BUILD_OPTIONS choose what and how
	for image in $(IMAGES); do \
		name=attention-$$(echo $$image | sed s/^server/serving/); \
		$(DOCKER_BUILD) --target $$image --tag $$name:$(TAG) \
			--build-arg SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) --build-arg REVISION=$$(git rev-parse HEAD) \
			$(BUILD_OPTIONS) . || exit 1; \
	done

sbom: ## write build/sbom/IMAGE/: the packages of an image, as CycloneDX and as a list
	for image in $(IMAGES); do \
		$(DOCKER_BUILD) --target sbom --build-arg SBOM_OF=$$image --output build/sbom/$$image $(BUILD_OPTIONS) . || exit 1; \
	done

lock: env ## pin the packages of the images by version and hash; needs uv
	$(PYTHON) -m scripts.lock_requirements

wheels: env ## build the wheels of the service and of the client into dist/, beside the versions they were tested with
	for project in . clients/python; do $(PYTHON) -m build --outdir dist $$project || exit 1; done
	cp constraints.txt dist

wheels-check: env ## run the demo from the wheels, with pinned and oldest dependencies; CHECK="--python python3.13" on another Python
	$(PYTHON) -m scripts.check_wheels $(CHECK)

lint: env ## check formatting, style, types, generated code and wire contracts
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	$(PYTHON) -m protos.generate --check
	cd protos && $(BUF) lint
	if command -v npm >/dev/null; then for package in clients/typescript clients/explorer; do \
		(cd $$package && npm ci --silent && npm run --silent lint) || exit 1; done; fi

format: env ## format the code
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format

protos: env ## generate the code of the wire contracts
	$(PYTHON) -m protos.generate

env: .venv/.installed-$(RUNTIME)

.venv/.installed-$(RUNTIME): pyproject.toml clients/python/pyproject.toml constraints.txt
	$(PYTHON3) -m venv .venv
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		-e 'clients/python[cli]' -e '.[$(RUNTIME),encoders,enrich,ray,dev]'
	touch $@

clean: ## remove everything that is not committed
	rm -rf .venv model_repository/* build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
