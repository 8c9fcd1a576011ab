"""Send commands to one Redis server or a Redis Cluster, with a deadline for each command and health tracking.

The Redis library handles connections, retries, slots, MOVED, ASK and failover. `RedisClient` adds three things. Every
command ends within `answer_s`, whatever it waits for: name resolution, a connection, a handshake, a retry, another
node. Its result is reported to a `RedisHealth`, and each failure is a `StoreUnavailable`. And connections to a server
that has become a replica are closed, since the address may lead to the new primary by now.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, ReadOnlyError, RedisClusterException, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import ErrorKind, TandemError

_ANSWER_S = 2.0
"""In seconds; on a healthy server every command of Tandem is faster."""
_STALL_GRACE_S = 0.05
"""Least time after a deadline to read a reply that arrived while this process did not run (it was stopped, or its host
took the core away)."""
_CLUSTER = "+cluster"
_FAILURES = (RedisError, RedisClusterException, OSError, AttributeError)
"""Exceptions that the library raises for a failed command. It raises AttributeError where the failure of another
command has closed the connection to which this one is about to write."""
SILENT_S = 60.0
"""A failure is forgotten after this time if its command was not sent again and other commands succeed."""
_log = logging.getLogger(__name__)


class StoreUnavailable(Exception):
    """Raised when Redis did not answer or refused a command; the command may have been executed or not.

    The caller may retry later. `__cause__` is the Redis library's exception, with a message for operators.
    """


class RedisHealth:
    """Track whether Redis executes the commands of this process's stores, and log each change once.

    Redis counts as down as soon as a command fails, and as up once every command that failed has succeeded again.
    `num_errors`: number of failed commands since the start, by the name of the store.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.num_errors: Counter[str] = Counter()
        self._clock = clock or SystemClock()
        # (store, command) -> (the command's first error, time of its last error)
        self._failing: dict[tuple[str, str], tuple[str, float]] = {}

    @property
    def is_up(self) -> bool:
        """Return whether no command is failing."""
        return not self._failing

    @property
    def problem(self) -> str | None:
        """Return the first error of the command that has been failing longest, as text; None if Redis is up."""
        return next((text for text, _ in self._failing.values()), None)

    def answered(self, store: str, command: str) -> None:
        """Record that a command of a store succeeded, which ends an earlier failure of the same command.

        Failures of other commands stay, because reads may succeed while writes fail.
        """
        if not self._failing:
            return
        since = self._clock.now() - SILENT_S
        self._failing.pop((store, command), None)
        self._failing = {key: failure for key, failure in self._failing.items() if failure[1] > since}
        if not self._failing:
            _log.info("Redis answers again")

    def failed(self, store: str, command: str, error: BaseException) -> None:
        """Record that a command of a store failed with `error`. `store`, `command`: names of the store and of the Redis
        command."""
        self.num_errors[store] += 1
        if not self._failing:
            message = "Redis fails to execute %s for the store %s, and this process goes on without Redis: %s"
            _log.warning(message, command, store, _text(error))
        text, _ = self._failing.get((store, command), (_text(error), 0.0))
        self._failing[store, command] = text, self._clock.now()


class RedisClient:
    """Send commands to one Redis server or a Redis Cluster; connects at the first command.

    `url`: `redis://`, `rediss://` or `unix://` for one server; `redis+cluster://host:port,host:port` or
    `rediss+cluster://` for a Redis Cluster, of which any reachable node is enough to find the others. `answer_s`:
    seconds that a command may take, connecting included. The result of each command is reported to `health` under the
    name `store`. Raises TandemError for other URLs, and for options in the URL that the Redis library does not know or
    that change the types of replies.
    """

    def __init__(
        self, url: str, answer_s: float = _ANSWER_S, *, store: str = "redis", health: RedisHealth | None = None
    ) -> None:
        try:
            _check_options(url)
            self.redis = _cluster(url, answer_s) if _CLUSTER in urlsplit(url).scheme else _server(url, answer_s)
        except (ValueError, TypeError, AttributeError, RedisError, RedisClusterException) as error:
            raise TandemError(ErrorKind.INVALID_REQUEST, f"redis.url is refused: {error}", param="redis.url") from error
        self.answer_s = answer_s
        self.health = health or RedisHealth()
        self._store = store

    async def execute(self, *command: Any) -> Any:
        """Send one command and return its reply.

        Raises StoreUnavailable when no reply arrives within `answer_s` seconds, or Redis refuses the command.
        """
        async with self.command_scope(str(command[0])):
            return await self.redis.execute_command(*command)

    @asynccontextmanager
    async def command_scope(self, command: str) -> AsyncGenerator[list[Any], None]:
        """Run commands of the Redis library's client in a `with` block, which must end within `answer_s` seconds.

        `command`: name under which the result of the block is reported to `health`. Raises StoreUnavailable where a
        command in the block fails. A block that runs a pipeline without raising on errors may add the replies to the
        list that `with` yields. At the end of the block, errors in that list are replaced by StoreUnavailable, and the
        first one is reported to `health`.
        """
        replies: list[Any] = []
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(None) as deadline:
                loop = asyncio.get_running_loop()
                due_s = loop.time() + self.answer_s
                timer = loop.call_at(due_s, _expire, deadline, due_s, self.answer_s)
                try:
                    yield replies
                finally:
                    timer.cancel()
        except _FAILURES as error:
            converted = unavailable(error, self.answer_s)
            await self._report(command, converted)
            raise converted from converted.__cause__
        finally:
            if task is not None and task.cancelling() > num_cancels:
                # The library writes in `asyncio.wait_for`, which before Python 3.12 drops a cancel that arrives
                # together with the result: the caller's loop would then run for ever.
                raise asyncio.CancelledError
        replies[:] = [unavailable(each, self.answer_s) if isinstance(each, Exception) else each for each in replies]
        await self._report(command, next((each for each in replies if isinstance(each, StoreUnavailable)), None))

    async def aclose(self) -> None:
        """Close all connections. A later command opens new ones, after resolving the address again."""
        await self.redis.aclose()
        if isinstance(self.redis, RedisCluster):
            # The library keeps these open while it reloads the slot table.
            await asyncio.gather(*(node.disconnect() for node in self.redis.get_nodes()))

    async def _report(self, command: str, error: StoreUnavailable | None) -> None:
        if error is None:
            self.health.answered(self._store, command)
            return
        cause = error.__cause__ or error
        self.health.failed(self._store, command, cause)
        is_lost = isinstance(self.redis, RedisCluster) and isinstance(cause, RedisConnectionError | RedisTimeoutError)
        if is_lost or isinstance(cause, ReadOnlyError):  # in a pipeline the library does not look for a new primary
            await self.aclose()


def _expire(deadline: asyncio.Timeout, due_s: float, longest_s: float) -> None:
    """Let `deadline` pass later by as much as this call is late, at least `_STALL_GRACE_S` and at most `longest_s`."""
    now = asyncio.get_running_loop().time()
    deadline.reschedule(now + min(max(now - due_s, _STALL_GRACE_S), longest_s))


def _retry() -> Retry:
    """Return a policy of one immediate retry, because a pooled connection may have died unnoticed; further retries are
    up to the callers of the stores."""
    return Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))


def _check_options(url: str) -> None:
    """Raise ValueError for an option with which replies would have other types than the stores expect."""
    options = parse_qs(urlsplit(url).query)
    if "decode_responses" in options or options.get("protocol", ["2"]) != ["2"]:
        raise ValueError("it must not set decode_responses, nor a protocol other than 2")


def _server(url: str, answer_s: float) -> Redis:
    # Without the library's read timeout, which would count time in which this process did not run.
    client = Redis.from_url(url, retry=_retry(), socket_timeout=None, socket_connect_timeout=answer_s)
    pool: Any = client.connection_pool  # untyped
    pool.make_connection()  # does not connect; options of the URL are checked only here
    return client


def _cluster(url: str, answer_s: float) -> RedisCluster:
    """Make a cluster client whose per-node timeout is half of `answer_s`, so that another node can be tried in time.

    The per-node timeout is the library's and also counts time in which this process did not run.
    """
    urls = _node_urls(url)
    nodes = [parse_url(each) for each in urls]
    seeds = [ClusterNode(node["host"], node.get("port", 6379)) for node in nodes[1:] if "host" in node]
    waits = {"socket_timeout": answer_s / 2, "socket_connect_timeout": answer_s / 2}
    found = RedisCluster.from_url(urls[0], startup_nodes=seeds, retry=_retry(), require_full_coverage=False, **waits)
    found.commands_parser = _KeyPositions()  # type: ignore[assignment]
    return found


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


def _node_urls(url: str) -> Sequence[str]:
    """Split a cluster URL into one single-server URL for each node."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    scheme = parts.scheme.removesuffix(_CLUSTER)
    found = [parts._replace(scheme=scheme, netloc=f"{user}{at}{host}").geturl() for host in hosts.split(",") if host]
    if not found:
        raise ValueError("it names no node of the cluster")
    return found


def unavailable(error: Exception, answer_s: float) -> StoreUnavailable:
    """Convert an exception of the Redis library to a StoreUnavailable and return it, with the exception as its cause.

    `answer_s`: the deadline in seconds that the message of a timeout names.
    """
    if isinstance(error, MovedError):
        error = RedisError(
            "this server is one of a Redis Cluster: let redis.url begin with redis+cluster:// (or rediss+)"
        )
    elif isinstance(error, RedisClusterException | AttributeError):  # not RedisErrors; the first: no node answers
        error = RedisConnectionError(str(error))
    elif isinstance(error, TimeoutError):
        error = RedisTimeoutError(f"no answer within {answer_s:g} s")
    found = StoreUnavailable(_text(error))
    found.__cause__ = error
    return found


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
