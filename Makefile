# Everything sets up what it needs: a virtual environment in .venv, and for the tests the cdktf and cdktn programs.
PYTHON ?= python3
VENV := .venv
BIN := $(abspath $(VENV))/bin
NPM := tests/npm
# Four beside one another on two cores: most tests wait for a program. What shares an expensive fixture stays together.
PYTEST = PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -n 4 --dist loadgroup --durations=20
export PYTHON
# With it every process of every test compiles Dask and skyinfra anew, which takes half of the time.
unexport PYTHONDONTWRITEBYTECODE
# Packages of Python, npm and Debian are installed beside one another.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += --jobs=3
endif

.PHONY: quickstart test test-all pytest pytest-all test-unpinned test-aws test-boot test-fresh test-vm test-faults lint checkov bench update-golden fake-nvml debian torch jax dask docs docs-tools browser clean

quickstart: $(VENV)/.quickstart
	PATH="$(BIN):$$PATH" sh stacks/quickstart/quickstart.sh

# The linters run beside the tests.
test: $(VENV)/.compiled $(NPM)/node_modules/.installed debian torch
	$(MAKE) lint pytest

test-all: $(VENV)/.compiled $(NPM)/node_modules/.installed debian torch jax dask docs-tools browser
	$(MAKE) lint pytest-all
	$(MAKE) test-unpinned

pytest:
	$(PYTEST) -m "not slow"

pytest-all:
	$(PYTEST) -n 6 -m "not long"

# With what users install: the newest versions, and the oldest that are admitted, each in a folder of build/unpinned.
test-unpinned:
	$(PYTHON) -m tools.unpinned build/unpinned

test-aws: $(VENV)/.dev
	$(PYTEST) tests/integration/aws

# Nodes that boot: needs root and Debian packages; installs what it lacks, and keeps what it builds in build/boot.
test-boot: $(VENV)/.dev debian
	$(PYTEST) -n 3 tests/integration/boot

# The tests in a bare Debian below build/fresh, where nothing was installed by hand: root, debootstrap and systemd-nspawn.
test-fresh:
	sh tools/fresh.sh build/fresh test

# A node in a virtual machine under emulation, for what containers do not enforce; installs QEMU.
test-vm: $(VENV)/.dev debian
	SKYINFRA_TEST_VM=1 PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/integration/boot/test_virtual_machine.py

# Nodes in network namespaces whose links, runners, workers, tasks and clients fail: root and iproute2.
test-faults: $(VENV)/.dev debian
	$(PYTEST) tests/integration/faults

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.house

# The module, and a stack that is synthesized from it; what is left out stands in .checkov.yaml, with reasons.
CHECKOV := build/checkov
checkov: $(VENV)/.dev
	@test -x $(CHECKOV)/bin/checkov || { $(PYTHON) -m venv $(CHECKOV) && $(CHECKOV)/bin/python -m pip install --quiet \
	  --disable-pip-version-check checkov==3.3.30; }
	cd stacks/aws-mig && PATH="$(BIN):$$PATH" $(BIN)/skyinfra synth
	$(CHECKOV)/bin/checkov --config-file .checkov.yaml -d modules/aws
	$(CHECKOV)/bin/checkov --config-file .checkov.yaml -d stacks/aws-mig/cdktf.out/stacks/aws-mig

bench: $(VENV)/.dev
	PATH="$(BIN):$$PATH" $(BIN)/python -m benchmarks

update-golden: $(VENV)/.dev
	UPDATE_GOLDEN=1 PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -q tests/test_golden.py

# Prints the folder of a fake NVIDIA driver, for LD_LIBRARY_PATH: see tests/fake_nvml/README.md.
fake-nvml: debian
	@$(PYTHON) tests/fake_nvml/build.py build/fake-nvml

# The fake driver is written in C, units are checked by systemd's own program, networks are made by ip, and jobs are run
# by Slurm; some volumes hold XFS, and rclone mounts buckets. Without them their tests fail under CI and are skipped elsewhere.
debian:
	@(for program in "$${CC:-gcc}" systemd-analyze ip nft sbatch mkfs.xfs rclone fusermount3; do command -v "$$program" || exit 1; done) >/dev/null || test "$$(id -u)" != 0 || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev systemd iproute2 nftables \
	  munge slurm-client slurmctld slurmd xfsprogs rclone fuse3; } >&2 || true

# PyTorch for the ranks of some tests; nothing is installed. Apt is asked after `debian` has.
torch: debian
	@test -d build/torch || ! command -v apt-get >/dev/null || sh tools/torch.sh build/torch $(PYTHON) >&2 || true

# JAX for the ranks of some tests, in a folder of its own.
jax: $(VENV)/.dev
	@test -d build/jax || { rm -rf build/jax.new && $(BIN)/python -m pip install --quiet --no-compile \
	  --disable-pip-version-check --constraint constraints.txt --target build/jax.new jax && mv build/jax.new build/jax; }

# The oldest Dask that pyproject.toml admits, in a folder of its own, for tests/engine/test_dask_versions.py.
DASK := 2025.5.1
dask: $(VENV)/.dev
	@test -d build/dask-$(DASK) || { rm -rf build/dask.new && $(BIN)/python -m pip install --quiet --no-compile --no-deps \
	  --disable-pip-version-check --target build/dask.new/site-packages distributed==$(DASK) dask==$(DASK) && mv build/dask.new build/dask-$(DASK); }

# The pages, in build/site; what builds them stands in a folder of its own.
docs: docs-tools
	$(BIN)/python -m tools.pictures
	$(BIN)/python -m tools.site

docs-tools: $(VENV)/.dev
	@test -d build/docs-tools || { rm -rf build/docs-tools.new && $(BIN)/python -m pip install --quiet --no-compile \
	  --disable-pip-version-check --constraint constraints.txt --target build/docs-tools.new zensical mkdocstrings-python && \
	  mv build/docs-tools.new build/docs-tools; }

# Debian's Chromium, and what drives it in tests/integration/test_fleet_page.py, in a folder of its own.
browser: $(VENV)/.dev debian
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || \
	  apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >&2 || true
	@test -d build/browser || { rm -rf build/browser.new && $(BIN)/python -m pip install --quiet --no-compile \
	  --disable-pip-version-check --constraint constraints.txt --target build/browser.new playwright && mv build/browser.new build/browser; }

clean:
	rm -rf $(VENV) $(NPM)/node_modules build/fake-nvml build/boot build/fresh build/torch build/jax build/browser build/docs-tools build/site build/unpinned build/dask-* $(CHECKOV)

$(VENV)/.quickstart: pyproject.toml constraints.txt tools/venv.sh
	sh tools/venv.sh $(VENV) cdktf,toolchain
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt tools/venv.sh
	sh tools/venv.sh $(VENV) cdktf,cdktn,toolchain,dev
	touch $@

# On a new machine each process of xdist would compile all tests, and what they import, at the same time.
$(VENV)/.compiled: $(VENV)/.dev
	@PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -q --collect-only >/dev/null || true
	touch $@

# Without npm the tests that need these programs say so: they fail under CI and are skipped elsewhere.
$(NPM)/node_modules/.installed: $(NPM)/package.json
	if command -v npm >/dev/null; then npm install --prefix $(NPM) --no-package-lock --no-audit --no-fund --loglevel=error; fi
	mkdir -p $(@D)
	touch $@
