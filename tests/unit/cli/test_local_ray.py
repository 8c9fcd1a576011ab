"""Test how `tandem serve` drains the workers of its local Ray, with stand-ins for Serve's calls."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cli import local_ray
from tandem.cli.local_ray import LocalRay
from tandem.core.config import Config, WorkerConfig

POOLS = {"prefill": 1, "decode": 1}


@pytest.fixture
def local() -> Iterator[LocalRay]:
    """Return a cluster whose control service accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        yield LocalRay(Path("logs"), 0, f"127.0.0.1:{service.getsockname()[1]}")


def deploy(local: LocalRay, drain_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray.serve, "run_many", lambda _targets: None)
    local.deploy(dict.fromkeys(POOLS, Config(worker=WorkerConfig(drain_s=drain_s))), POOLS)


def test_a_drain_may_take_longer_than_serve_waits_for_it(local: LocalRay, monkeypatch: pytest.MonkeyPatch) -> None:
    deploy(local, 120.0, monkeypatch)
    calls: list[str] = []

    def delete(app: str) -> None:
        calls.append(app)
        if len(calls) == 1:
            raise TimeoutError("Some of these applications weren't deleted after 60s")

    monkeypatch.setattr(local_ray.serve, "delete", delete)
    local.drain()
    assert calls == ["tandem-prefill", "tandem-prefill", "tandem-decode"]


def test_a_drain_that_does_not_end_is_given_up(local: LocalRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "STOP_MARGIN_S", 0.0)
    deploy(local, 0.0, monkeypatch)

    def delete(_app: str) -> None:
        raise TimeoutError("planted")

    monkeypatch.setattr(local_ray.serve, "delete", delete)
    with pytest.raises(TimeoutError, match="planted"):
        local.drain()
