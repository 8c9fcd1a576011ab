"""Test a real Prometheus over a real cluster under load: every query of every dashboard and alert evaluates, every
panel that can have data has it, and the numbers are those that clients saw.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.files import dashboards, panel_queries, rules
from tests.e2e.cluster import PATIENCE_S, Program
from tests.e2e.gateway.http import prompt
from tests.e2e.gateway.processes import Cluster, Gateway, cluster, until
from tests.e2e.gateway.prometheus import Prometheus, filled_in, prometheus
from tests.e2e.gateway.tenants import key_of, tenants_file
from tests.otlp import OtlpReceiver, otlp_receiver
from tests.ports import free_port

pytestmark = pytest.mark.nightly
SETTINGS = (
    *("--served-model-name", "tiny", "--transfer-backend", "local", "--kv-cache-memory", "32MiB"),
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--speculative-method", "ngram"),
    *("--disaggregation", "auto", "--early-rejection", "off"),
    *("--ttft-ms", "20000", "--itl-ms", "20000", "--standard-ttft-ms", "20000"),
)
TENANTS = {
    "split": "lane: interactive, cache_sharing: public, disaggregation: prefer, tokens_per_minute: 100000000, ",
    "whole": "lane: standard, cache_sharing: public, disaggregation: 'off', ",
    "either": "lane: standard, ",
    "slow": "lane: batch, requests_per_minute: 2, ",
}
LENGTH = 600
INTERVALS = {"__rate_interval": "1m", "__range": "1m"}
VALUES = dict.fromkeys(("namespace", "tenant", "lane", "pool", "worker"), ".*") | INTERVALS

EMPTY = {
    "tandem_planner_actuator_errors_total": "nothing is asked of Kubernetes",
    "tandem_worker_breaker": "no worker fails",
    "tandem_redis_errors_total": "Redis does what is asked of it",
    "tandem_model_shortage": "no model lacks workers",
    "tandem_rebalance_moves_total": "gateway.rebalance is off",
    "tandem_held_requests": "no request waits for a worker to start",
    "tandem_expert_tokens_total": "the model has no experts",
    "tandem_expert_imbalance_ratio": "the model has no experts",
}
"""Series that may have no data in a healthy cluster, and why."""

QUIET = {
    *("TandemTargetDown", "TandemGatewayNotReady", "TandemNoWorker", "TandemWorkerUnhealthy", "TandemBreakerOpen"),
    *("TandemRedisDown", "TandemQuotasAlone", "TandemPrefixIndexUnreachable", "TandemBlocksQuarantined"),
    *("TandemRequestsFail", "TandemTransfersFail", "TandemFallsBack", "TandemLeasesStay", "TandemRefuses"),
    *("TandemLinkBelowRequirement", "TandemWorkersUnscraped"),
}
"""Alerts whose condition must not hold even for a moment here; those about speed may on a busy machine."""


@dataclass(slots=True)
class Watched:
    """Own a cluster that had its load. `began_at` is in seconds since the epoch; `statuses` are those that each
    tenant's clients got.
    """

    gateway: Gateway
    server: Prometheus
    receiver: OtlpReceiver
    began_at: float
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in TENANTS})

    def complete(self, tenant: str, salt: int, **body: Any) -> str:
        """Return the path that a request took; empty where it was refused."""
        given = {"model": "tiny", "prompt": prompt(LENGTH, salt), "max_tokens": 48, "temperature": 0, **body}
        headers = {"x-api-key": key_of(tenant)}
        url = f"{self.gateway.url}/v1/completions"
        answer = httpx.post(url, json=given, headers=headers, timeout=PATIENCE_S, trust_env=False)
        self.statuses[tenant][answer.status_code] += 1
        return str(answer.headers.get("x-tandem-path", ""))

    def num(self, status: int) -> int:
        return sum(found[status] for found in self.statuses.values())


def start(running: Cluster, directory: Path) -> Gateway:
    """Start a pair of workers and a gateway that has transferred a block between them."""
    file = directory / "tenants.yaml"
    file.write_text(tenants_file(TENANTS))
    running.worker("p", "prefill")
    running.worker("d", "decode")
    gateway = running.gateway("gateway", "--auth", "keys", "--tenants", str(file))
    running.wait_serving()
    return gateway


@contextmanager
def planning(directory: Path, redis_url: str) -> Iterator[str]:
    """Run a planner that only explains; yield its metrics address."""
    address = f"127.0.0.1:{free_port()}"
    settings = ("--namespace", "watched", "--ttft-ms", "20000", "--itl-ms", "20000", "--interval-s", "1")
    port = address.rpartition(":")[2]
    program = Program(
        directory, "planner", "planner", "--redis-url", redis_url, *settings, "--planner-metrics-port", port
    )
    try:
        program.wait_ready()
        yield address
    finally:
        program.stop()


def load(watched: Watched) -> None:
    """Send more requests than run at once, some of them twice, until each worker was scraped more than once."""
    is_over = threading.Event()

    def work(tenant: str, first: int) -> None:
        for salt in itertools.count(first):
            watched.complete(tenant, salt, stream=True)
            watched.complete(tenant, salt)
            if is_over.is_set():
                return

    tenants = [*["split"] * 8, *["whole"] * 3]
    threads = [
        threading.Thread(target=work, args=(tenant, 10_000 * (number + 1))) for number, tenant in enumerate(tenants)
    ]
    for thread in threads:
        thread.start()
    for salt in range(6):
        watched.complete("slow", salt, max_tokens=4)
    try:
        until(lambda: seen_twice(watched.server), "figures of all processes that have grown")
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def seen_twice(server: Prometheus) -> bool:
    """Return whether finished requests and steps of either worker grew from one scrape to another."""
    grown = server.query("increase(tandem_steps_total[1m]) > 0")
    workers = {dict(labels)["worker"] for labels in grown}
    paths = server.query("increase(tandem_placements_total[1m]) > 0")
    return workers == {"p", "d"} and {dict(labels)["path"] for labels in paths} >= {"remote", "local"}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, redis_url: str, model: Path) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    with otlp_receiver("grpc") as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        patch.setenv("OTEL_METRICS_EXPORTER", "none")
        with cluster(directory, redis_url, model, *SETTINGS, "--namespace", "watched") as running:
            gateway = start(running, directory)
            metrics = gateway.ready["metrics"]
            with planning(directory, redis_url) as planner, prometheus(directory, metrics, planner) as server:
                watched = Watched(gateway, server, receiver, server.value("time()"))
                until(lambda: server.value("sum(up)") == 4, "four targets that are up")
                begin(watched)
                load(watched)
                num_requests = sum(found.total() for found in watched.statuses.values())
                until(
                    lambda: server.value("sum(tandem_requests_total)") == num_requests, "a scrape of all that was asked"
                )
                # A rate is of two scrapes, and asked for each second between them.
                until(lambda: server.value("min(count_over_time(tandem_requests_total[1m]))") > 2, "two more")
                yield watched


def begin(watched: Watched) -> None:
    """Cause what only an idle cluster does reliably: the prefill worker fetches a prompt that only the decode worker
    has cached, and a short prompt is not disaggregated.
    """
    watched.complete("whole", 1, prompt=prompt(4000, 1))
    until(lambda: watched.server.value("tandem_prefix_index_blocks") >= 240, "an index that knows the prompt")
    watched.complete("split", 1, prompt=prompt(4000, 1))
    until(
        lambda: "local;reason=" in watched.complete("either", 2, prompt=[3, 4, 5], max_tokens=2),
        "a reason not to split",
    )


def test_all_processes_are_scraped_under_distinct_labels(watched: Watched) -> None:
    targets = watched.server.get("targets")["activeTargets"]
    assert [target["lastError"] for target in targets] == 4 * [""]
    labels = [target["labels"] for target in targets]
    targets = {(found["job"], found.get("worker"), found.get("pool"), found.get("model")) for found in labels}
    assert targets == {
        ("tandem-gateway", None, None, None),
        ("tandem-planner", None, None, None),
        ("tandem-worker", "p", "prefill", "tiny"),
        ("tandem-worker", "d", "decode", "tiny"),
    }


def test_metrics_equal_what_clients_saw(watched: Watched) -> None:
    server = watched.server
    assert server.value('sum(tandem_requests_total{outcome="finished"})') == watched.num(200) > 0
    assert server.value('sum(tandem_requests_total{outcome="quota_exceeded"})') == watched.num(429) > 0
    assert server.value('sum(tandem_admissions_total{decision="refused",tenant="slow"})') == watched.num(429)
    assert server.value('sum(tandem_http_responses_total{status="429"})') == watched.num(429)
    assert server.value("sum(gen_ai_server_time_to_first_token_seconds_count)") == watched.num(200)
    assert server.value("sum(tandem_placements_total)") == watched.num(200)
    lengths = 'sum(gen_ai_client_token_usage_sum{gen_ai_token_type="output"})'
    assert server.value("sum(tandem_output_tokens_total)") == server.value(lengths) > 0


def test_every_panel_has_data_unless_it_cannot(watched: Watched) -> None:
    """Each of its queries."""
    empty = [
        query
        for query in panel_queries()
        if not watched.server.has_data(filled_in(query.expression, VALUES), watched.began_at)
    ]
    assert [query.where for query in empty if not any(series in query.expression for series in EMPTY)] == []


def test_every_rule_evaluates_and_a_cluster_that_is_well_is_quiet(watched: Watched) -> None:
    groups = watched.server.get("rules")["groups"]
    states = [(rule["name"], rule["health"], rule.get("lastError", "")) for group in groups for rule in group["rules"]]
    assert {state for state in states if state[1:] != ("ok", "")} == set()
    assert {name for name, *_ in states} == {
        rule.get("alert") or rule["record"] for rule in (*rules("alert"), *rules("record"))
    }
    holding = {rule["alert"] for rule in rules("alert") if watched.server.query(rule["expr"])}
    assert not holding & QUIET
    assert {rule["alert"] for rule in rules("alert")} >= QUIET


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("namespace", set()),
        ("tenant", set(TENANTS)),
        ("lane", {"interactive", "standard", "batch"}),
        ("pool", {"prefill", "decode"}),
        ("worker", {"p", "d"}),
    ],
)
def test_variables_offer_what_there_is(watched: Watched, name: str, expected: set[str]) -> None:
    every = (variable for board in dashboards() for variable in board["templating"]["list"])
    query = next(variable["query"]["query"] for variable in every if variable["name"] == name)
    series = query.removeprefix("label_values(").rpartition(",")[0]
    assert set(watched.server.get(f"label/{name}/values", **{"match[]": filled_in(series, VALUES)})) == expected


def test_exemplars_lead_to_traces(watched: Watched) -> None:
    """The exemplars of the first token belong to requests whose root span was sent."""
    now = watched.server.value("time()")
    series_name = "gen_ai_server_time_to_first_token_seconds_bucket"
    found = watched.server.get("query_exemplars", query=series_name, start=str(now - 600), end=str(now))
    traces = {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}
    assert traces
    watched.receiver.wait(lambda receiver: traces <= {span.trace_id.hex() for _, span in receiver.spans})
