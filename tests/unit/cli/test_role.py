"""Test `tandem role` and `tandem drain` with wrong usage and without workers; tests/e2e covers them with workers."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.cli.role import _warning, table
from tandem.stores.worker_registry import WorkerRegistry
from tests.unit.stores.records import record

_numbers = itertools.count()


def fill(url: str, namespace: str, *names: str) -> None:
    async def publish() -> None:
        registry = WorkerRegistry(url, namespace, ttl_s=60.0)
        for name in names:
            await registry.publish(record(name))
        await registry.close()

    asyncio.run(publish())


@pytest.fixture
def here(redis_url: str) -> list[str]:
    return ["--redis-url", redis_url, "--namespace", f"cli{next(_numbers)}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["role"], "set --redis-url"),
        (["role", "w0"], "w0 is missing: add one of prefill, decode, mixed"),
        (["drain", "w0"], "set --redis-url"),
        (["drain", "w0", "--timeout", "-1"], "--timeout -1 must be between 0"),
        (["drain", "w0", "--undo", "--timeout", "1"], "--undo takes neither"),
        (["drain", "--local", "--undo"], "--undo takes neither"),
        (["drain", "w0", "--timeout", "nan"], "--timeout nan must be between 0"),
        (["role", "--redis-url", "unix:///nowhere", "--secret-file", "/nowhere"], "cluster.secret_file: cannot read"),
        (["role", "--redis-url", "unix:///nowhere", "--tls-ca-file", "ca"], "cluster.tls_cert_file is empty"),
    ],
)
def test_wrong_usage_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_role_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["role", "w0", "encode"])
    assert "'prefill', 'decode', 'mixed'" in capsys.readouterr().err


def test_a_redis_that_does_not_answer_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["role"], ["role", "w0", "mixed"], ["drain", "w0"]):
        assert main([*command, "--redis-url", f"unix://{tmp_path}/nothing.sock"]) == 1
        assert "Redis does not answer" in capsys.readouterr().err


@pytest.mark.redis
def test_an_empty_cluster_has_no_workers(here: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["role", *here]) == 0
    assert capsys.readouterr().out == "no worker is registered\n"
    assert main(["role", "w0", "mixed", *here]) == 1
    assert "'w0' is not registered" in capsys.readouterr().err


@pytest.mark.redis
def test_a_worker_that_does_not_answer_is_listed_and_takes_a_role(
    redis_url: str, here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(redis_url, here[-1], "w1", "a-longer-name")
    assert main(["role", "w1", "prefill", *here]) == 0
    assert capsys.readouterr().out == "w1: decode -> prefill (pool decode)\n", "a-longer-name still decodes"
    assert main(["role", "w1", "decode", *here]) == 0
    assert "warning: smol has no prefill worker now" in capsys.readouterr().out
    assert main(["role", "w1", "prefill", *here]) == 0
    assert main(["role", *here]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[1].split()[:5] == ["a-longer-name", "decode", "decode", "all", "1795000000000000001"]
    assert lines[2].split()[:3] == ["w1", "decode", "prefill"]
    assert all("unreachable: unavailable" in line for line in lines[1:])
    assert main(["drain", "w1", *here]) == 1
    assert "worker w1: unavailable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("roles", "lacks"),
    [
        ({"prefill"}, "decode"),
        ({"decode"}, "prefill"),
        ({"decode", "mixed"}, "prefill"),
        ({"prefill", "mixed"}, ""),
        ({"prefill", "decode"}, ""),
        ({"mixed"}, ""),
    ],
)
def test_workers_without_a_partner_are_a_warning(roles: set[str], lacks: str) -> None:
    assert _warning("smol", roles) == "" if not lacks else f"smol has no {lacks} worker now" in _warning("smol", roles)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table([("A", "BB", "C"), ("long", "b", "")]) == "A     BB  C\nlong  b"
