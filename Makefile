.DEFAULT_GOAL := help
.PHONY: help setup demo test check fmt up down migrate run bench clean

PYTHON ?= python3
BIN := .venv/bin
CODE := models streams processors alembic scripts tests

help: ## Show this help
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: .venv/.stamp ## Make .venv with everything pinned in requirements.lock (quick when nothing changed)

.venv/.stamp: requirements.lock pyproject.toml scripts/setup
	@PYTHON=$(PYTHON) scripts/setup
	@touch $@
