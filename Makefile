# Two commands do everything on a fresh machine with Python 3.10+, git and make: `make rehearse` and `make test`.
# Both make .venv first (a few minutes, once: torch is large); `.venv/bin/fleetctl` is there afterwards.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet

.PHONY: help venv rehearse test suite types boot-test boot-vm pythons soak mutants bench lint clean day options innocents
help:
	@echo "make rehearse   a whole job on this machine: local cloud, spot interruptions, real training (no AWS account)"
	@echo "make day        an operator's whole day with fleetctl on the local cloud, two to four minutes"
	@echo "make options    every option of job.toml lived once by real machines of the local cloud, about ten minutes"
	@echo "make innocents  scripts that know nothing of spotheal, each interrupted as a whole job, up to an hour"
	@echo "make test       style, types and all tests"
	@echo "make mutants    every safety line taken out in turn: which tests fall"
	@echo "make boot-test  a fresh machine: Debian's cloud-init and systemd run the user data (root, Debian; a minute)"
	@echo "make pythons    every Python here, 3.10 and newer, as operator's and as instance's: all pairs boot (minutes)"
	@echo "make boot-vm    the same in virtual machines, with NVMe disks that are plugged in and the power button (an hour)"
	@echo "make soak       the full figures: recovery, mutants, all crash points, 10,000 random histories, all options"
	@echo "make venv       only the virtual environment, .venv"
	@echo "make clean      remove what the others made"

venv: $(READY)

# torch comes first and pinned: left to the resolver, a newer one with gigabytes of CUDA could be chosen.
$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "make: Python 3.10 or newer is needed; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(install_venv)
	@test -x $(VENV)/bin/python || echo "making $(VENV): a few minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@echo "  torch and torchvision ..."
	@$(PIP) install --constraint constraints.txt torch torchvision
	@echo "  the rest ..."
	@$(PIP) install --constraint constraints.txt --editable '.[rehearsal,training,integrations,streaming,tracking,test]'
	@touch $@

# Debian and Ubuntu ship Python without its venv.
define install_venv
{ if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	apt-get update -q && apt-get install -q -y python3-venv; \
    else \
	echo "make: this Python cannot make virtual environments; first: sudo apt-get install python3-venv" >&2; exit 1; \
    fi; }
endef

rehearse: $(READY)
	@$(VENV)/bin/fleetctl rehearse

# An operator's day with fleetctl alone, from an empty account of the local cloud to nothing left.
day: $(READY)
	@bash tests/operators_day.sh $(VENV)/bin/fleetctl

# Where each option is lived: tests/options/lived.toml. The silent rehearsals of every kind, too.
options: $(READY)
	$(VENV)/bin/python -m pytest -q --durations=10 tests/options/live_options.py tests/options/live_verbs.py
	SPOTHEAL_SILENT_SCENARIOS=quiet,sweep,elastic,batch $(VENV)/bin/python -m pytest -q tests/rehearsal/test_rehearsal_silence.py

# Every scenario of one machine; SPOTHEAL_INNOCENTS=kill,notice for some.
SPOTHEAL_INNOCENTS ?= all
innocents: $(READY)
	SPOTHEAL_INNOCENTS=$(SPOTHEAL_INNOCENTS) $(VENV)/bin/python -m pytest -q -n 2 tests/options/live_innocents.py

lint: $(READY) types
	$(VENV)/bin/ruff check .

types: $(READY)
	$(VENV)/bin/mypy

# Types beside the tests: mypy alone would keep one processor for a minute, and nobody the others.
test: $(READY)
	$(VENV)/bin/ruff check .
	@$(MAKE) --no-print-directory -j2 types suite

suite: $(READY)
	$(VENV)/bin/python -m pytest -n 3 --dist loadfile

# Part of `make test` too, with this machine's Debian alone, where root and the programs allow; the first time Debian
# roots are made. Here the newest Debian, with the newest Python, boots as well.
boot-test: $(READY)
	SPOTHEAL_DEBIANS="stable testing" $(VENV)/bin/python -m pytest -q -s tests/boot

# It says which Pythons it found; each gets an environment of its own, without torch, the first time.
pythons: $(READY)
	$(VENV)/bin/python tests/boot/python_pairs.py

boot-vm: $(READY)
	$(VENV)/bin/python tests/boot/besieged_vm.py
	$(VENV)/bin/python tests/boot/boot_vm.py

# What the tests are worth: every safety line taken out in turn must make one fall (tests/mutants).
mutants: $(READY)
	$(VENV)/bin/python tests/mutants/run.py

# The full figures, up to 85 minutes: every crash point, 10,000 random histories, every mutant, the recovery figures,
# every option lived once.
HISTORIES ?= 0:10000
# Every pair of crashes; PAIRS=3 makes it each third, where time is short.
PAIRS ?= 1
soak: $(READY)
	$(VENV)/bin/python bench/recovery.py
	$(VENV)/bin/python tests/mutants/run.py
	SPOTHEAL_THROTTLED=1000 $(VENV)/bin/python -m pytest -q tests/agent/life/test_safety.py
	SPOTHEAL_STOPS=1 $(VENV)/bin/python -m pytest -q tests/training/test_streaming_loaders.py
	$(PIP) install --upgrade --target $(VENV)/programs wandb py-spy uv
	SPOTHEAL_SLOW_WORKLOADS=1 SPOTHEAL_EXTRA_PACKAGES=$(CURDIR)/$(VENV)/programs \
	    $(VENV)/bin/python -m pytest -q tests/attacks
	SPOTHEAL_EXAMPLES=10000 $(VENV)/bin/python -m pytest -q tests/userdata/test_userdata_hostile.py tests/agent/protocol/test_redaction.py
	SPOTHEAL_EXAMPLES=500 $(VENV)/bin/python -m pytest -q tests/attacks/test_parsers.py
	$(VENV)/bin/python tests/simulation/histories.py $(HISTORIES)
	SPOTHEAL_LIVES=0:300 $(VENV)/bin/python -m pytest -q tests/second_ec2
	$(VENV)/bin/python tests/simulation/crashes.py singles
	$(VENV)/bin/python tests/simulation/crashes.py pairs $(PAIRS)
	$(VENV)/bin/fleetctl rehearse --scenario ddp --output json
	@$(MAKE) --no-print-directory options
	@$(MAKE) --no-print-directory innocents SPOTHEAL_INNOCENTS=standard
	SPOTHEAL_CRASHES=0 SPOTHEAL_HISTORIES=0:1 $(VENV)/bin/python -m pytest -q -n 3 tests/simulation/test_simulated_healing.py

# The checkpoint figures beside torch.save, safetensors, DCP and Lightning, and the trainer beside a bare loop: on a
# quiet machine about 15 minutes; every program ends with 1 where a figure is missed.
bench: $(READY)
	@failed=0; for program in checkpoint throughput redaction fleetctl; do \
	    $(VENV)/bin/python bench/$$program.py || failed=1; done; exit $$failed

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
