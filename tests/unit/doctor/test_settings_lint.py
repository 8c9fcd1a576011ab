"""Test the findings on combinations of settings."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.core.settings import resolve
from tandem.doctor.settings_lint import judge_settings
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_warns

WARNED: list[tuple[dict[str, Any], str, str]] = [
    ({"worker.advertise_address": "h:1"}, "worker.port=0 listens at any", "set worker.port to the port"),
    ({"gateway.auth": "off", "gateway.host": "0.0.0.0"}, "everybody is served", "--auth keys"),
    ({"gateway.auth": "off", "gateway.allowed_hosts": "*"}, "could read answers", "gateway.allowed_hosts, or leave"),
    ({"cluster.insecure": True, "worker.host": "10.0.0.1"}, "cluster.insecure", "--secret-file FILE"),
    ({"handoff.lease_s": 40.0}, "handoff.lease_s is longer", "at most handoff.pull_timeout_s"),
    (
        {"planner.mode": "act", "slo.itl_ms": 50.0, "planner.min_decode": 0},
        "requests for empty pools wait for gateway.no_worker_wait_s only",
        "gateway.wake_timeout_s",
    ),
    ({"handoff.digests": False}, "handoff.digests is off", "--kv-digests"),
]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"planner.mode": "act"}, "slo has no target", "slo.ttft_ms and slo.itl_ms"),
    ({"transfer.require": "rdma", "transfer.backend": "local"}, "never leaves", "transfer.backend=auto"),
    ({"transfer.require": "rdma", "transfer.backend": "tcp"}, "TCP alone", "transfer.backend=auto"),
    ({"transfer.require": "cuda_ipc"}, "no GPU memory", "transfer.require=shared_memory or any"),
]
HARMLESS: list[dict[str, Any]] = [
    {"worker.advertise_address": "10.0.0.1:50051", "worker.port": 50051},
    {"gateway.auth": "off", "gateway.host": "127.0.0.1"},
    {"gateway.auth": "off", "gateway.allowed_hosts": "llm.example.org"},
    {"gateway.allowed_hosts": "*"},
    {"planner.mode": "act", "slo.itl_ms": 50.0},
    {"planner.mode": "act", "slo.itl_ms": 50.0, "planner.min_prefill": 0, "gateway.wake_timeout_s": 60.0},
    {"planner.min_prefill": 0},
    {"transfer.require": "rdma"},
    {"transfer.require": "cuda_ipc", "model.device": "cuda"},
]


@pytest.mark.parametrize(("values", "found", "fix"), WARNED)
def test_combinations_that_are_warned_about(values: dict[str, Any], found: str, fix: str) -> None:
    (finding,) = judge_settings(resolve([("test", values)]))
    assert_warns(finding, "settings", found, fix)


@pytest.mark.parametrize(("values", "found", "fix"), REFUSED)
def test_combinations_that_fail(values: dict[str, Any], found: str, fix: str) -> None:
    (finding,) = judge_settings(resolve([("test", values)]))
    assert_fails(finding, "settings", found, fix)


@pytest.mark.parametrize("values", HARMLESS)
def test_what_is_fine(values: dict[str, Any]) -> None:
    (finding,) = judge_settings(resolve([("test", values)]))
    assert_fine(finding, "settings", f"{len(values)} settings from test")


def test_the_defaults() -> None:
    (finding,) = judge_settings(resolve([]))
    assert_fine(finding, "settings", "all of them the defaults")
