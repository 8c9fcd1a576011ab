"""Test `tandem planner` as a program: it observes a real cluster's demand, exports its state, and stops on a signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from tests.e2e.cluster import PATIENCE_S, Program
from tests.e2e.gateway.pair import Pair
from tests.e2e.gateway.processes import Gateway, until

SETTINGS = ("--ttft-ms", "500", "--itl-ms", "50", "--interval-s", "1", "--min-decode", "3")


def planner(redis_url: str, *arguments: str) -> tuple[str, ...]:
    return ("planner", "--redis-url", redis_url, "--namespace", "calm", *SETTINGS, *arguments)


def once(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


@pytest.fixture
def running(calm: Pair, redis_url: str, tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path, "planner", *planner(redis_url, "--json"))
    program.wait_ready()
    yield program
    program.stop()


def test_one_decision_is_made_and_explained(calm: Pair, redis_url: str) -> None:
    calm.complete(40, 71)
    done = once(*planner(redis_url, "--once", "--json"))
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    running = sum(isinstance(one, Gateway) and one.exit_code is None for one in calm.cluster.programs)
    assert (plan["model"], plan["outcome"]) == ("tiny", "explained") and plan["num_gateways"] >= running >= 2
    assert plan["workers"] == {"p": "prefill", "d": "decode"}
    observed = plan["observed"]
    assert observed["prefill"]["num_serving"] == observed["decode"]["num_serving"] == 1
    assert observed["demand"]["seconds"] > 0
    able = observed["decode_worker"]
    assert able["num_blocks"] == calm.decode.books().num_blocks and able["block_size"] == 16
    assert able["cost"]["base_s"] >= 0 and able["max_num_batched_tokens"] == 64, "as the worker says itself"
    assert plan["target"] == {"prefill": 1, "decode": 3} and plan["replicas"] == {"prefill": 1, "decode": 3}
    assert any("decode grows from 1 to 3" in reason for reason in plan["reasons"])
    client: Any = Redis.from_url(redis_url)
    assert not client.keys("*calm:target*"), "nothing is changed by what only explains"
    client.close()


def test_the_planner_observes_demand_and_exports_its_state(calm: Pair, running: Program) -> None:
    lines: list[dict[str, Any]] = []
    out = running._process.stdout
    assert out is not None

    def demand() -> dict[str, Any]:
        lines.append(json.loads(out.readline()))
        return lines[-1].get("observed", {}).get("demand") or {}

    until(demand, "a second look")
    for salt in range(4):
        calm.complete(50, 80 + salt, max_tokens=5)
        calm.complete(50, 80 + salt, max_tokens=5)
    seen = {"num_requests": 0, "num_input_tokens": 0, "num_cached_tokens": 0, "num_output_tokens": 0, "num_gaps": 0}

    def has_all() -> bool:
        for name, number in demand().items():
            if name in seen:
                seen[name] += number
        return seen["num_requests"] == 8 and seen["num_output_tokens"] == 40

    until(has_all, f"eight requests: {seen}")
    assert seen["num_gaps"] == 8 * 4 and seen["num_input_tokens"] >= 8 * 50
    assert 0 < seen["num_cached_tokens"] < seen["num_input_tokens"], "each prompt came twice"
    metrics = httpx.get(f"http://{running.ready['metrics']}/metrics", trust_env=False).text
    assert 'tandem_planner_target{role="decode"} 3' in metrics
    assert 'tandem_planner_workers{role="decode",state="serving"} 1' in metrics
    assert 'tandem_planner_decisions_total{outcome="explained"}' in metrics
    assert httpx.get(f"http://{running.ready['metrics']}/health", trust_env=False).status_code == 200
    running.signal(signal.SIGTERM)
    assert running.wait() == 0
    assert running.complaints() == []


@pytest.mark.nightly
def test_a_target_is_published_by_one_planner_at_a_time(calm: Pair, redis_url: str, tmp_path: Path) -> None:
    first = Program(tmp_path, "first", *planner(redis_url, "--json", "--mode", "act", "--no-change-roles"))
    first.wait_ready()

    def outcome(program: Program) -> str:
        out = program._process.stdout
        assert out is not None
        return str(json.loads(out.readline())["outcome"])

    until(lambda: outcome(first) == "carried_out", "a decision that is carried out")
    other = once(*planner(redis_url, "--once", "--json", "--mode", "act", "--min-decode", "5"))
    plan = json.loads(other.stdout)
    assert plan["outcome"] == "standby" and first.ready["planner"] in plan["reasons"][-1]
    client: Any = Redis.from_url(redis_url)
    (key,) = client.keys("*calm:target*replicas")
    assert json.loads(client.get(key))["replicas"] == {"prefill": 1, "decode": 3}
    assert first.stop() == 0
    other = once(*planner(redis_url, "--once", "--mode", "act", "--min-decode", "5"))
    assert other.stdout.startswith("the planner decided on 1 prefill, 5 decode (carried_out)\n"), (
        "who ends leaves it to the next one"
    )
    client.delete(key)
    client.close()
