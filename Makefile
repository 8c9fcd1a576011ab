# Every target sets itself up: Python 3.11 or later, a C++ compiler and make are all it needs.

.PHONY: help setup system serve check test nightly containers hosts cluster mutants sizes proto boards runbook chart bench
.DEFAULT_GOAL := help

# Tests start many processes, each of which would compile all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

# What `make check` runs, one process for each part, so that only two import torch. The last part has all rooms that no
# other has.
WITH_RAY := tests/unit/worker tests/unit/transfer tests/unit/doctor tests/unit/loadtest
WITH_MODELS := tests/unit/runtime tests/property
DECIDING := tests/unit/sched tests/unit/workload tests/unit/scaling tests/unit/admission tests/unit/cli
OTHERS := tests/architecture tests/unit $(patsubst %,--ignore=%,$(WITH_RAY) $(WITH_MODELS) $(DECIDING) tests/unit/gateway)
PARTS := "$(WITH_RAY)" "$(WITH_MODELS)" "tests/unit/gateway" "$(DECIDING)" "$(OTHERS)"

# One process more than cores, for tests that wait; each imports and collects everything, so not many.
PROCESSES := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 4)))
# Side by side, each file in one process, in the order that tests/conftest.py gives them.
SIDE_BY_SIDE := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --timeout=600

# What `make cluster` runs: tests of the cluster, and those of the planner that run on the API server's double too.
ON_A_CLUSTER := tests/cluster tests/unit/planner tests/e2e/gateway/test_two_planners.py

BIN := .venv/bin
ARGS ?=

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16
	@echo "  ARGS=... goes to the program: make serve ARGS='--port 9000 --decode 2'"

setup: ## make .venv what pyproject.toml and constraints.txt ask for, with the tools of tests and load tests
	@.ci/setup all

system:
	@.ci/system

serve: ## serve a small model on this machine: one prefill and one decode worker, and the gateway
	@.ci/setup serve
	@$(BIN)/tandem serve $(ARGS)

check: setup ## format, types, floors, generated files, unit and property tests: at most 90 seconds, before every commit
	@TANDEM_TEST_EFFORT=check PROCESSES=$(PROCESSES) .ci/check -q -m "not slow and not nightly and not cluster" --timeout=600 -- $(PARTS)

test: setup system ## all of that at full breadth, exactness, one test of each path through real processes: what CI runs
ifeq ($(ARGS),)
	@.ci/check -m "not nightly and not cluster" $(SIDE_BY_SIDE)
else
	$(BIN)/python -m pytest -m "not nightly and not cluster" $(ARGS)
endif

nightly: setup system ## full grids of exactness, chaos and soak, every flow on Ray, in a browser and in containers: at most 80 minutes
	TANDEM_TEST_EFFORT=nightly $(BIN)/python -m pytest -m "nightly and not cluster" $(SIDE_BY_SIDE) --timeout=1800 $(ARGS)
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory containers
endif

hosts: setup system ## a cluster on five hosts (network namespaces) of this machine, whose links can be cut, slow and lossy
	@$(BIN)/python -m tests.hosts $(ARGS)

cluster: setup ## the chart and the planner on the Kubernetes cluster of TANDEM_KUBECONFIG, in namespaces of their own
	$(BIN)/python -m pytest -m cluster --timeout=1800 $(or $(ARGS),$(ON_A_CLUSTER))

containers: setup ## build the images, start deploy/compose.yaml with an engine of its own, break it, leave nothing: some 7 minutes
	@.ci/system containers
	$(BIN)/python -m pytest tests/containers --timeout=3600 -s $(ARGS)

mutants: setup ## plant faults in the product and see which tests find them: make mutants ARGS='kv sched --number 20'
	$(BIN)/python -m tests.mutants $(ARGS)

sizes: setup ## the longest files, classes and functions
	@$(BIN)/python .ci/sizes.py $(ARGS)

proto: setup ## generate services/tandem/wire/gen from proto/
	$(BIN)/python .ci/generate_proto.py

boards: setup ## generate deploy/grafana/dashboards from deploy/grafana/boards
	$(BIN)/python .ci/generate_dashboards.py

runbook: setup ## generate deploy/RUNBOOK.md from deploy/prometheus/alerts.yaml
	$(BIN)/python .ci/generate_runbook.py

chart: setup ## generate helm/tandem/values.schema.json from helm/schema.yaml and the settings
	$(BIN)/python .ci/generate_chart_schema.py

bench: setup ## cost of the HTTP front end, telemetry and the prefix index; then compare workloads with the bare engine and installed peers
	@$(BIN)/python -m loadtest frontend --quick
	@$(BIN)/python -m loadtest telemetry --quick
	@$(BIN)/python -m loadtest index
	@$(BIN)/python -m loadtest bench $(ARGS)
