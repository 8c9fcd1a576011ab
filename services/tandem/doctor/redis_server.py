"""Check that the Redis server at `redis.url` meets Tandem's requirements, without writing a key; read its clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError

from tandem.core.clock import Clock, wall_ns
from tandem.doctor.finding import Finding, fail, format_version, ok, warn
from tandem.stores.redis_client import RedisClient, StoreUnavailable

OLDEST = (7, 0)
"""Oldest version that is tested; the first Valkey version is 7.2."""
SLOW_S = 0.02
"""Round trip above which Redis counts as slow; a request with quotas waits for two round trips."""
_NUM_PINGS = 5


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """State of a Redis server.

    `problem`: why it did not answer, else empty. `is_auth`: it refused our user or password. `info`: reply to INFO,
    empty if our user may not send it. `script_problem`: why it runs no Lua scripts, else empty. `ping_s`: seconds of
    the fastest PING. `ahead_s`: its clock minus this machine's, plus or minus `within_s`."""

    problem: str = ""
    is_auth: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    script_problem: str = ""
    ping_s: float = 0.0
    ahead_s: float = 0.0
    within_s: float = 0.0


async def read_redis(url: str, clock: Clock) -> RedisFacts:
    client = RedisClient(url, store="doctor")
    try:
        pings = []
        for _ in range(_NUM_PINGS):
            began = clock.now()
            await client.execute("PING")
            pings.append(clock.now() - began)
        sent_at, began = wall_ns() / 1e9, clock.now()
        seconds, micros = await client.execute("TIME")
        took = clock.now() - began
        ahead = seconds + micros / 1e6 - (sent_at + took / 2)
        return RedisFacts("", False, await _info(client), await _script_problem(client), min(pings), ahead, took / 2)
    except StoreUnavailable as error:
        return RedisFacts(problem=str(error.__cause__) or str(error), is_auth=_is_auth(error.__cause__))
    finally:
        await client.aclose()


def judge_redis(facts: RedisFacts, url: str) -> tuple[Finding, ...]:
    where = without_password(url)
    if facts.problem:
        return (_unreachable(facts, where),)
    summary = f"{where}: {_summary(facts.info)}, {facts.ping_s * 1e3:.1f} ms"
    if not facts.info:
        fix = "`redis-cli acl setuser <user> +info` for the user of redis.url"
        unknown = f"{where} hides its version, role and memory policy: our user may not send INFO"
        return (warn("redis", unknown, fix), *_script(facts, where))
    wrong_kind = _kind(facts, url, where)
    if wrong_kind:
        return wrong_kind
    wrong = (*_version(facts.info, where), *_memory(facts.info, where), *_script(facts, where))
    late = (_latency(facts.ping_s, where),) if facts.ping_s > SLOW_S else ()
    return (*wrong, *late) or (ok("redis", summary),)


def without_password(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//***@", url)


def version_of(info: Mapping[str, Any]) -> tuple[str, tuple[int, int]]:
    """Return "redis" or "valkey", and its version as (major, minor)."""
    is_valkey = info.get("server_name") == "valkey"
    text = str(info.get("valkey_version" if is_valkey else "redis_version", "0.0"))
    major, minor, *_ = [*text.split("."), "0"]
    return ("valkey" if is_valkey else "redis"), (int(major), int(minor))


def _unreachable(facts: RedisFacts, where: str) -> Finding:
    if facts.is_auth:
        fix = "the user and password in redis.url (redis://user:password@host:6379), as TANDEM_REDIS__URL from a Secret"
        return fail("redis", f"{where} refuses our login: {facts.problem}", fix)
    if "redis+cluster" in facts.problem:
        return fail(
            "redis", f"{where}: {facts.problem}", "redis+cluster:// (or rediss+cluster://) as redis.url's scheme"
        )
    if "Cluster mode is not enabled" in facts.problem:
        return fail("redis", f"{where} is a single server, not a Redis Cluster", f"redis.url as {_as_single(where)}")
    fix = (
        f"check that it runs and that the network lets you reach it: `redis-cli -u {where} ping`; TLS needs rediss://; "
        "in a pod check `redis.external.addresses` and the NetworkPolicy"
    )
    return fail("redis", f"{where} does not answer: {facts.problem}", fix)


def _version(info: Mapping[str, Any], where: str) -> tuple[Finding, ...]:
    kind, version = version_of(info)
    if version >= OLDEST:
        return ()
    summary = f"{where} is {kind} {format_version(version)}, tested are {format_version(OLDEST)} and later, and Valkey"
    return (fail("redis", summary, "Redis 7 or Valkey 8 (`redis.mode: builtin` of the chart is one)"),)


def _kind(facts: RedisFacts, url: str, where: str) -> tuple[Finding, ...]:
    """Return a failure unless the server is a primary, and of the kind (cluster or single) that the URL names."""
    info = facts.info
    if info.get("role", "master") != "master":
        primary = f"{info.get('master_host', 'unknown')}:{info.get('master_port', '')}"
        fix = f"redis.url of the primary ({primary}), or of a name that follows it"
        return (fail("redis", f"{where} is a replica, which takes no writes", fix),)
    is_cluster, url_is_cluster = bool(int(info.get("cluster_enabled", 0))), "+cluster" in url.partition(":")[0]
    if is_cluster and not url_is_cluster:
        return (fail("redis", f"{where} is a node of a Redis Cluster", f"redis.url as {_as_cluster(where)}"),)
    if url_is_cluster and not is_cluster:
        return (fail("redis", f"{where} is a single server, not a Redis Cluster", f"redis.url as {_as_single(where)}"),)
    return ()


def _memory(info: Mapping[str, Any], where: str) -> tuple[Finding, ...]:
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy == "noeviction":
        return ()
    fix = "`redis-cli config set maxmemory-policy noeviction`, and the same in its configuration"
    summary = f"{where} evicts keys when it is full (maxmemory-policy {policy}): quotas and workers would be lost"
    return (warn("redis", summary, fix),)


def _script(facts: RedisFacts, where: str) -> tuple[Finding, ...]:
    if not facts.script_problem:
        return ()
    fix = "`redis-cli acl setuser <user> +eval +evalsha +script` for the user of redis.url"
    return (fail("redis", f"{where} runs no scripts for our user: {facts.script_problem}", fix),)


def _latency(seconds: float, where: str) -> Finding:
    fix = "a Redis in the same zone, or a less busy one (`redis-cli --latency`, SLOWLOG GET)"
    return warn("redis", f"{where} takes {seconds * 1e3:.0f} ms for a PING, and requests wait for it", fix)


def judge_own_server(problem: str) -> tuple[Finding, ...]:
    """Report whether `tandem serve` can start a server, if no URL is set. `problem`: why not, empty if it can."""
    if not problem:
        return (ok("redis", "redis.url is empty: `serve` starts a server of its own"),)
    fix = "`pip install 'tandem[worker]'`, which brings a server, or --redis-url with one of yours"
    return (fail("redis", f"redis.url is empty, and there is no server that `serve` could start: {problem}", fix),)


async def _info(client: RedisClient) -> Mapping[str, Any]:
    try:
        return _flat(await client.execute("INFO"))
    except StoreUnavailable as error:
        if isinstance(error.__cause__, NoPermissionError):
            return {}
        raise


async def _script_problem(client: RedisClient) -> str:
    try:
        await client.execute("EVAL", "return 1", 1, "{tandem-doctor}")
    except StoreUnavailable as error:
        return str(error.__cause__)
    return ""


def _flat(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the INFO reply of one server; for a cluster the library may return one for each node: take the first."""
    first = next(iter(info.values()), None)
    return first if isinstance(first, Mapping) and "redis_version" in first else info


def _is_auth(error: BaseException | None) -> bool:
    kinds = (AuthenticationError, AuthorizationError, NoPermissionError)
    return isinstance(error, kinds) or str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM"))


def _summary(info: Mapping[str, Any]) -> str:
    kind, version = version_of(info)
    return f"{kind} {format_version(version)}, primary, scripts run"


def _as_cluster(where: str) -> str:
    scheme, _, rest = where.partition("://")
    return f"{scheme}+cluster://{rest}"


def _as_single(where: str) -> str:
    return where.replace("+cluster", "", 1)
