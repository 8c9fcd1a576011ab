"""How a Redis client is made here: its deadlines and its patience; never sends a command."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

_ANSWER_S = 2.0
"""No command of ours takes longer on a server that is well."""


def connect(url: str, answer_s: float = _ANSWER_S) -> Redis:
    """A client for `redis://`, `rediss://` or `unix://` that connects at its first command, and waits `answer_s`
    seconds for a connection or an answer.

    One retry, at once, because a pooled connection may have died unseen; beyond that the caller decides. Raises
    ValueError for another kind of URL.
    """
    retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
    return Redis.from_url(url, socket_timeout=answer_s, socket_connect_timeout=answer_s, retry=retry)
