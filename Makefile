# Two commands do everything on a fresh machine: `make rehearse` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: rehearse test lint venv clean
venv: $(READY)

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip setuptools
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[rehearsal,training,test]'
	touch $@

rehearse: $(READY)
	$(VENV)/bin/fleetctl rehearse

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: $(READY) lint
	$(VENV)/bin/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info
