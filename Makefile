# Every target sets itself up: Python 3.11 or later, a C++ compiler and make are all it needs.

.PHONY: help setup system serve test check golden soak proto boards runbook chart bench
.DEFAULT_GOAL := help

# Tests start many processes, each of which would compile all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

# Their tests are slow, and only to import them takes seconds in each process; the chart's render it hundreds of times.
SLOW_ROOMS := chaos chart e2e golden
# They start whole clusters, which know each other by time: nothing else runs beside them.
ALONE := tests/chaos tests/e2e
# One process more than cores, for tests that wait; each imports and collects everything, so not many.
PROCESSES := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 4)))
# In the order of their files, of which the long ones come first. Processes that share cores take longer.
SIDE_BY_SIDE := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --timeout=600
# What `make test` leaves to the two targets below.
USUAL := -m "not golden and not soak"

BIN := .venv/bin
ARGS ?=

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16
	@echo "  ARGS=... goes to the program: make serve ARGS='--port 9000 --decode 2'"

setup: ## make .venv what pyproject.toml and constraints.txt ask for
	@.ci/setup

system:
	@.ci/system

serve: setup ## serve a small model on this machine: one prefill and one decode worker, and the gateway
	@$(BIN)/tandem serve $(ARGS)

test: setup system ## all tests but the golden grid and the soak tests
ifeq ($(ARGS),)
	@status=0; set -x; \
	$(BIN)/python -m pytest $(USUAL) $(ALONE:%=--ignore=%) $(SIDE_BY_SIDE) || status=1; \
	$(BIN)/python -m pytest $(USUAL) $(ALONE) || status=1; \
	exit $$status
else
	$(BIN)/python -m pytest $(USUAL) $(ARGS)
endif

check: setup ## what should be green before every commit, in two minutes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python .ci/generate_proto.py --check
	$(BIN)/python .ci/generate_dashboards.py --check
	$(BIN)/python .ci/generate_runbook.py --check
	$(BIN)/python .ci/generate_chart_schema.py --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	TANDEM_QUICK=1 $(BIN)/python -m pytest -q -n $(PROCESSES) --dist loadfile $(SLOW_ROOMS:%=--ignore=tests/%) \
		-m "not slow and not ray and not golden and not soak" $(ARGS)

golden: setup ## the full grid of exactness against the reference
	$(BIN)/python -m pytest -m golden --timeout=1800 $(ARGS)

soak: setup ## tests that run for long to find what is rare: machines of states, random inputs, faults
	TANDEM_SOAK=1 $(BIN)/python -m pytest -m soak --timeout=7200 $(ARGS)

proto: setup ## generate services/tandem/wire/gen from proto/
	$(BIN)/python .ci/generate_proto.py

boards: setup ## generate deploy/grafana/dashboards from deploy/grafana/boards
	$(BIN)/python .ci/generate_dashboards.py

runbook: setup ## generate deploy/RUNBOOK.md from deploy/prometheus/alerts.yaml
	$(BIN)/python .ci/generate_runbook.py

chart: setup ## generate helm/tandem/values.schema.json from helm/schema.yaml and the settings
	$(BIN)/python .ci/generate_chart_schema.py

bench: setup ## what the door, telemetry and the prefix index cost; then compare workloads with the bare engine and installed peers
	@$(BIN)/python -m loadtest door --quick
	@$(BIN)/python -m loadtest telemetry --quick
	@$(BIN)/python -m loadtest index
	@$(BIN)/python -m loadtest bench $(ARGS)
