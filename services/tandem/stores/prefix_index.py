"""The prefix index in Redis: streams of facts by shard and one snapshot for each worker; never what they come to.

Every command has one key, so Redis Cluster may put each where it likes:

    {namespace:index:SHARD}        stream; what the workers of a shard tell, cut to some `MAX_ENTRIES`
    {namespace:index:w:ID}:blocks  what a worker holds, written by that worker alone; lapses with it
    {namespace:index:w:ID}:want    "incarnation:number": some gateway wants a snapshot of at least so many facts

Writing an entry twice does no harm, since facts are numbered, so what may have been lost is written again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.exceptions import RedisError

from tandem.core.ids import WorkerId, WorkerRef
from tandem.routing.kv_indexer import WorkerKVEvents
from tandem.stores.index_format import (
    IndexFormatError,
    IndexSnapshot,
    pack_entry,
    pack_snapshot,
    unpack_entry,
    unpack_snapshot,
)
from tandem.stores.redis_client import Client, connect
from tandem.stores.redis_health import RedisHealth

NUM_SHARDS = 16
"""The same for ever and everywhere: who writes and who reads must agree."""
MAX_ENTRIES = 4096
"""Of a shard: at 20 ms per entry some 5 s of 16 workers. What is older is in a snapshot."""
MAX_FACTS = 128
"""In an entry: 1 KiB, so a stream is at most 5 MiB."""
READ_ENTRIES = 256
"""Of a shard in one read."""
SNAPSHOT_TTL_S = 30.0
WANT_TTL_S = 10.0
STREAM_TTL_S = 3600.0
"""Nobody tells anything for so long: the namespace is not used any more."""
_FIELD = b"f"
_log = logging.getLogger(__name__)


class IndexUnavailable(Exception):
    """Redis does not answer, or refuses; what was written may be there or not. Trying again later is right."""


def shard_of(worker: WorkerId) -> int:
    """The stream in which a worker tells: the same in every process."""
    return int.from_bytes(hashlib.blake2b(worker.encode(), digest_size=8).digest(), "little") % NUM_SHARDS


class IndexWriter:
    """One life of one worker. `url` as `tandem.stores.redis_client.connect` takes it."""

    def __init__(self, url: str, namespace: str, worker: WorkerRef, *, health: RedisHealth | None = None) -> None:
        self._redis = connect(url, store="index", health=health)
        self._worker = worker
        self._stream = _stream(namespace, shard_of(worker.id))
        self._blocks, self._want = _blocks(namespace, worker.id), _want(namespace, worker.id)

    async def tell(self, entries: Sequence[WorkerKVEvents]) -> None:
        """Append entries, in order: of these, after an error, any number from the first on may be there. Raises
        IndexUnavailable."""
        async with _asking(self._redis, "XADD") as pipe:
            for entry in entries:
                pipe.xadd(self._stream, {_FIELD: pack_entry(entry)}, maxlen=MAX_ENTRIES, approximate=True)
            pipe.pexpire(self._stream, _ms(STREAM_TTL_S))
            await pipe.execute()

    async def write(self, snapshot: IndexSnapshot) -> None:
        """Replace this worker's snapshot. Raises IndexUnavailable."""
        async with _asking(self._redis, "SET") as pipe:
            pipe.set(self._blocks, pack_snapshot(snapshot), px=_ms(SNAPSHOT_TTL_S))
            await pipe.execute()

    async def renew(self) -> int | None:
        """Keep the snapshot from lapsing. Returns how many facts one must stand for that some gateway wants, 0 where
        none does; None when there is no snapshot. Raises IndexUnavailable."""
        async with _asking(self._redis, "PEXPIRE") as pipe:
            pipe.pexpire(self._blocks, _ms(SNAPSHOT_TTL_S))
            pipe.get(self._want)
            is_there, want = await pipe.execute()
        return self._wanted(want) if is_there else None

    async def withdraw(self) -> None:
        """Leave no snapshot behind. Raises IndexUnavailable."""
        async with _asking(self._redis, "DEL") as pipe:
            pipe.delete(self._blocks)
            await pipe.execute()

    async def close(self) -> None:
        await self._redis.aclose()

    def _wanted(self, want: bytes | None) -> int:
        """Another life's is not ours."""
        life, _, number = (want or b"").partition(b":")
        return int(number) if life == str(self._worker.incarnation).encode() and number.isdigit() else 0


class IndexReader:
    """One gateway's way through the streams. `url` as `tandem.stores.redis_client.connect` takes it."""

    def __init__(self, url: str, namespace: str, *, health: RedisHealth | None = None) -> None:
        self._redis = connect(url, store="index", health=health)
        self._namespace = namespace
        self._streams = [_stream(namespace, shard) for shard in range(NUM_SHARDS)]
        self._after = [b"0-0"] * NUM_SHARDS
        self._has_unreadable = False

    async def read(self) -> tuple[list[WorkerKVEvents], bool]:
        """What is new, at most `READ_ENTRIES` of each shard; entries of one worker are in order. True: there may be
        more at once. Raises IndexUnavailable, and then begins again with the oldest entries that there are: another
        server may answer next, whose entries have other places.
        """
        try:
            async with _asking(self._redis, "XREAD") as pipe:
                for stream, after in zip(self._streams, self._after, strict=True):
                    pipe.xread({stream: after}, count=READ_ENTRIES)
                answers = await pipe.execute()
        except BaseException:
            self._after = [b"0-0"] * NUM_SHARDS
            raise
        entries: list[WorkerKVEvents] = []
        has_more = False
        for shard, answer in enumerate(answers):
            for _, found in answer or ():
                self._after[shard] = found[-1][0]
                has_more = has_more or len(found) == READ_ENTRIES
                entries += self._readable(fields.get(_FIELD, b"") for _, fields in found)
        return entries, has_more

    async def snapshot(self, worker: WorkerId) -> IndexSnapshot | None:
        """A worker's snapshot, of whichever life; None where there is none that can be read. Raises
        IndexUnavailable."""
        async with _asking(self._redis, "GET") as pipe:
            pipe.get(_blocks(self._namespace, worker))
            (raw,) = await pipe.execute()
        try:
            return None if raw is None else unpack_snapshot(raw)
        except IndexFormatError as error:
            self._complain(error)
            return None

    async def want(self, worker: WorkerRef, number: int) -> None:
        """Ask a worker for a snapshot that stands for at least `number` facts. Of several gateways the last is heard,
        so ask again until it is there. Raises IndexUnavailable."""
        async with _asking(self._redis, "SET") as pipe:
            pipe.set(_want(self._namespace, worker.id), f"{worker.incarnation}:{number}", px=_ms(WANT_TTL_S))
            await pipe.execute()

    async def close(self) -> None:
        await self._redis.aclose()

    def _readable(self, raws: Iterable[bytes]) -> list[WorkerKVEvents]:
        entries: list[WorkerKVEvents] = []
        for raw in raws:
            try:
                entries.append(unpack_entry(raw))
            except IndexFormatError as error:
                self._complain(error)
        return entries

    def _complain(self, error: IndexFormatError) -> None:
        """Once: another version may write many."""
        if not self._has_unreadable:
            _log.warning("the prefix index holds what cannot be read here: %s", error)
        self._has_unreadable = True


def _stream(namespace: str, shard: int) -> str:
    return f"{{{namespace}:index:{shard}}}"


def _blocks(namespace: str, worker: WorkerId) -> str:
    return f"{{{namespace}:index:w:{worker}}}:blocks"


def _want(namespace: str, worker: WorkerId) -> str:
    return f"{{{namespace}:index:w:{worker}}}:want"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


@asynccontextmanager
async def _asking(redis: Client, command: str) -> AsyncGenerator[Any, None]:
    """A pipeline. A cluster is looked at before there is one, so that may fail like what is asked. Raises
    IndexUnavailable."""
    try:
        async with redis.command_scope(command), redis.pipeline(transaction=False) as pipe:
            yield pipe
    except (RedisError, OSError) as error:
        raise IndexUnavailable(f"{type(error).__name__}: {error}") from error
