"""How a Redis client is made here: one server or a Redis Cluster, its deadlines and patience; never sends a command.

A client differs from the library's in three ways. Every command has an end within `answer_s`, whatever it waits for:
a name, a connection, a handshake, a retry, another node. What became of it is told to a `RedisHealth`. And a server
that has become a replica is left, since a name or a balancer may lead to the new primary by now.
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
"""No command of ours takes longer on a server that is well."""
_CLUSTER = "+cluster"
_FAILURES = (RedisError, RedisClusterException, OSError, AttributeError)
"""What the library raises when a command fails; the last where another command's failure has closed the connection that
this one is about to write to."""


class _ObservedClient:
    """What both kinds of client add to the library's."""

    store = ""
    answer_s = _ANSWER_S
    health: RedisHealth

    @asynccontextmanager
    async def command_scope(self, command: str) -> AsyncGenerator[list[Any], None]:
        """Around whatever is asked under this name, which ends within `answer_s` as `Deadline` counts. The errors among
        the answers that are put into the list count like one that is raised; that a script is not known counts as an
        answer."""
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
            told = explained(error, self.answer_s)
            await self._failed(command, told)
            raise told from error
        finally:
            if task is not None and task.cancelling() > num_cancels:
                # The library writes in `asyncio.wait_for`, which before Python 3.12 forgets a cancel that comes with
                # the result: the loop that asks would go on for ever.
                raise asyncio.CancelledError
        answers[:] = [explained(a, self.answer_s) if isinstance(a, Exception) else a for a in answers]
        first = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if first is None:
            self.health.answered(self.store, command)
        else:
            await self._failed(command, first)

    async def leave(self) -> None:
        """Close the connections; the next command opens new ones, to whatever the address leads to by then."""
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
    """Slots, MOVED, ASK and failover are the library's."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with self.command_scope(str(args[0])):
            return await super().execute_command(*args, **options)

    async def leave(self) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """The library closes nothing where it was about to look at the cluster anew."""
        await super().aclose()
        for kind in ("nodes_cache", "startup_nodes"):
            await self.nodes_manager.aclose(kind)

    async def _failed(self, command: str, error: Exception) -> None:
        await super()._failed(command, error)
        if isinstance(error, RedisConnectionError | RedisTimeoutError):
            # In a pipeline the library does not look for who took over.
            await self.leave()


class _KeyPlaces:
    """Where the keys of our commands are. The library asks a node for all commands that there are, each time that it
    looks at the cluster anew: always the first node, also when it is that one which does not answer."""

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
    """A client that connects at its first command, and waits `answer_s` seconds for an answer. `health` hears of it as
    of `store`.

    `redis://`, `rediss://` and `unix://` name one server; `redis+cluster://host:port,host:port` and `rediss+cluster://`
    a Redis Cluster, of which any node leads to all.

    One retry, at once, because a pooled connection may have died unseen; beyond that the caller decides. Raises
    ValueError for another kind of URL.
    """
    retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
    client: Client
    if _CLUSTER in urlsplit(url).scheme:
        client = _cluster(url, answer_s, retry)
    else:
        # No limit of the library's on an answer: it would count time in which this process stood still.
        one = StandaloneClient.from_url(url, retry=retry, socket_timeout=None, socket_connect_timeout=answer_s)
        client = cast(StandaloneClient, one)
    client.store, client.answer_s, client.health = store, answer_s, health or RedisHealth()
    return client


def _cluster(url: str, answer_s: float, retry: Retry) -> ClusterClient:
    """One node that does not answer leaves half of the time for another one; that limit is the library's, and counts
    time in which this process stood still."""
    urls = _node_urls(url)
    nodes = [parse_url(each) for each in urls]
    seeds = [ClusterNode(node["host"], node.get("port", 6379)) for node in nodes[1:] if "host" in node]
    try:
        waits = {"socket_timeout": answer_s / 2, "socket_connect_timeout": answer_s / 2}
        found = ClusterClient.from_url(urls[0], startup_nodes=seeds, retry=retry, require_full_coverage=False, **waits)
    except RedisClusterException as error:
        raise ValueError(f"redis.url: {error}") from error
    found.commands_parser = _KeyPlaces()  # type: ignore[assignment]
    return cast(ClusterClient, found)


def _node_urls(url: str) -> Sequence[str]:
    """One for each node, as the library reads them."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    scheme = parts.scheme.removesuffix(_CLUSTER)
    found = [parts._replace(scheme=scheme, netloc=f"{user}{at}{host}").geturl() for host in hosts.split(",") if host]
    if not found:
        raise ValueError("redis.url names no node of the cluster")
    return found


def explained(error: Exception, answer_s: float) -> Exception:
    """What to tell people of it."""
    if isinstance(error, MovedError):
        return RedisError(
            "this server is one of a Redis Cluster: let redis.url begin with redis+cluster:// (or rediss+)"
        )
    if isinstance(error, RedisClusterException | AttributeError):  # no RedisError; the first: no node answers
        return RedisConnectionError(str(error))
    if isinstance(error, TimeoutError):
        return RedisTimeoutError(f"no answer within {answer_s:g} s")
    return error
