"""Make Redis clients for one server or a Redis Cluster, with deadlines and health tracking.

A client differs from the library's in three ways. Every command ends within `answer_s`, whatever it waits for: name
resolution, a connection, a handshake, a retry, another node. Its result is reported to a `RedisHealth`. And connections
to a server that has become a replica are closed, since the address may lead to the new primary by now.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, NoScriptError, ReadOnlyError, RedisClusterException, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tandem.stores.deadline import Deadline
from tandem.stores.redis_health import RedisHealth

_ANSWER_S = 2.0
"""In seconds; on a healthy server every command of Tandem is faster."""
_CLUSTER = "+cluster"
_FAILURES = (RedisError, RedisClusterException, OSError, AttributeError)
"""Exceptions that the library raises for a failed command. It raises AttributeError where the failure of another
command has closed the connection to which this one is about to write."""


class _ObservedClient:
    """Mix-in that adds the deadline and the health reports to both kinds of client."""

    store = ""
    answer_s = _ANSWER_S
    health: RedisHealth

    @asynccontextmanager
    async def command_scope(self, command: str) -> AsyncGenerator[list[Any], None]:
        """Run a command or pipeline under the deadline `answer_s` and report its result to `health` as `command`.

        The caller may put the replies of a pipeline into the list that it gets: the first error among them is reported
        like a raised one. NoScriptError counts as a success, since the server answered.
        """
        answers: list[Any] = []
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task is not None else 0
        try:
            async with Deadline(self.answer_s):
                yield answers
        except NoScriptError:
            self.health.answered(self.store, command)
            raise
        except _FAILURES as error:
            converted = explained(error, self.answer_s)
            await self._failed(command, converted)
            raise converted from error
        finally:
            if task is not None and task.cancelling() > num_cancels:
                # The library writes in `asyncio.wait_for`, which before Python 3.12 drops a cancel that arrives
                # together with the result: the caller's loop would then run for ever.
                raise asyncio.CancelledError
        answers[:] = [explained(a, self.answer_s) if isinstance(a, Exception) else a for a in answers]
        first = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if first is None:
            self.health.answered(self.store, command)
        else:
            await self._failed(command, first)

    async def leave(self) -> None:
        """Close the connections; the next command resolves the address again and opens new ones."""
        raise NotImplementedError

    async def _failed(self, command: str, error: Exception) -> None:
        self.health.failed(self.store, command, error)
        if isinstance(error, ReadOnlyError):
            await self.leave()


class StandaloneClient(_ObservedClient, Redis):  # type: ignore[misc]  # the library's own bases differ in a method
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with self.command_scope(str(args[0])):
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    async def leave(self) -> None:
        await self.connection_pool.disconnect()


class ClusterClient(_ObservedClient, RedisCluster):  # type: ignore[misc]
    """Client of a Redis Cluster. The library handles slots, MOVED, ASK and failover."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with self.command_scope(str(args[0])):
            return await super().execute_command(*args, **options)

    async def leave(self) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections, including those that the library keeps open while it reloads the slot table."""
        await super().aclose()
        for kind in ("nodes_cache", "startup_nodes"):
            await self.nodes_manager.aclose(kind)

    async def _failed(self, command: str, error: Exception) -> None:
        await super()._failed(command, error)
        if isinstance(error, RedisConnectionError | RedisTimeoutError):
            # In a pipeline the library does not look for the new primary.
            await self.leave()


class _KeyPositions:
    """Command parser that knows which arguments of Tandem's commands are keys, without asking a server.

    The library's own parser queries the COMMAND table of the first node each time it reloads the slot table, even when
    that node does not answer.
    """

    async def initialize(self, node: ClusterNode | None = None) -> None:
        return None

    async def get_keys(self, *command: Any) -> tuple[Any, ...]:
        if str(command[0]).upper() == "XREAD":
            streams = command[command.index(b"STREAMS") + 1 :]
            return streams[: len(streams) // 2]
        return command[1:2]


Client = StandaloneClient | ClusterClient


def connect(
    url: str, answer_s: float = _ANSWER_S, *, store: str = "redis", health: RedisHealth | None = None
) -> Client:
    """Make a client that connects at its first command and waits `answer_s` seconds for the result of each.

    `redis://`, `rediss://` and `unix://` name one server; `redis+cluster://host:port,host:port` and `rediss+cluster://`
    a Redis Cluster, of which any reachable node is enough to find the others. Results are reported to `health` under
    the name `store`. Raises ValueError for other URLs.

    A command is retried once, immediately, because a pooled connection may have died unnoticed; further retries are up
    to the caller.
    """
    retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
    client: Client
    if _CLUSTER in urlsplit(url).scheme:
        client = _cluster(url, answer_s, retry)
    else:
        # Without the library's read timeout, which would count time in which this process did not run.
        standalone = StandaloneClient.from_url(url, retry=retry, socket_timeout=None, socket_connect_timeout=answer_s)
        client = cast(StandaloneClient, standalone)
    client.store = store
    client.answer_s = answer_s
    client.health = health or RedisHealth()
    return client


def _cluster(url: str, answer_s: float, retry: Retry) -> ClusterClient:
    """Make a cluster client whose per-node timeout is half of `answer_s`, so that another node can be tried in time.

    The per-node timeout is the library's and also counts time in which this process did not run.
    """
    urls = _node_urls(url)
    nodes = [parse_url(each) for each in urls]
    seeds = [ClusterNode(node["host"], node.get("port", 6379)) for node in nodes[1:] if "host" in node]
    try:
        waits = {"socket_timeout": answer_s / 2, "socket_connect_timeout": answer_s / 2}
        found = ClusterClient.from_url(urls[0], startup_nodes=seeds, retry=retry, require_full_coverage=False, **waits)
    except RedisClusterException as error:
        raise ValueError(f"redis.url: {error}") from error
    found.commands_parser = _KeyPositions()  # type: ignore[assignment]
    return cast(ClusterClient, found)


def _node_urls(url: str) -> Sequence[str]:
    """Split a cluster URL into one single-server URL for each node."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    scheme = parts.scheme.removesuffix(_CLUSTER)
    found = [parts._replace(scheme=scheme, netloc=f"{user}{at}{host}").geturl() for host in hosts.split(",") if host]
    if not found:
        raise ValueError("redis.url names no node of the cluster")
    return found


def explained(error: Exception, answer_s: float) -> Exception:
    """Convert an exception of the library into one with a message for operators; `answer_s` is named in timeouts."""
    if isinstance(error, MovedError):
        return RedisError(
            "this server is one of a Redis Cluster: let redis.url begin with redis+cluster:// (or rediss+)"
        )
    if isinstance(
        error, RedisClusterException | AttributeError
    ):  # neither is a RedisError; the first means that no node answers
        return RedisConnectionError(str(error))
    if isinstance(error, TimeoutError):
        return RedisTimeoutError(f"no answer within {answer_s:g} s")
    return error
