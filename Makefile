.DEFAULT_GOAL := help
.PHONY: help setup demo test check static fmt up browser down migrate run bench bench-outbox profile clean

PYTHON ?= python3
BIN := .venv/bin
CODE := $(wildcard models streams processors alembic scripts tests bench)

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: .venv/.stamp ## Make .venv with everything pinned in requirements.lock (quick when nothing changed)

.venv/.stamp: requirements.lock pyproject.toml scripts/setup
	@PYTHON=$(PYTHON) scripts/setup
	@touch $@

demo: setup ## See it work on this machine alone: 1,000 registrations, no services, no root
	@$(BIN)/afluente demo

test: static up browser ## Everything: what check does, and all tests against real services (one line of pytest at the end)
	@$(BIN)/pytest tests

check: static ## Format, lint, types, import contracts, unit and house tests (under a minute, no services)
	@$(BIN)/pytest -q tests/unit tests/house

static: setup
	@$(BIN)/ruff format --check --output-format concise .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --strict $(CODE)
	@$(BIN)/lint-imports --no-logo

fmt: setup ## Format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

up: setup ## Start RabbitMQ and PostgreSQL for development (may be repeated)
	@scripts/services up

browser: setup ## Install Chromium for the tests of the operators' page (quick when it is there)
	@scripts/services browser

down: ## End what `make up` started
	@scripts/services down

migrate: setup ## Bring the database of DATABASE_URL to the newest schema
	@$(BIN)/afluente migrate

run: setup ## Run one processor, or all: make run P=mailer
	@$(BIN)/afluente run $(or $(P),$(error say which processor: make run P=mailer, or P=all))

bench: setup ## Measure against FastStream, kills, split, memory; starts what it needs (15 minutes)
	@$(BIN)/python -m bench

bench-outbox: setup ## Measure relay and sync against a poller and a job queue (8 minutes)
	@$(BIN)/python -m bench.outbox

profile: setup ## Flame graph of a processor at work: make profile P=mailer
	@$(BIN)/python -m bench.profiling $(or $(P),$(error say which processor: make profile P=mailer))

clean: ## Remove the environment and all caches (not the services' data)
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
