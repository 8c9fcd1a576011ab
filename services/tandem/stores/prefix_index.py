"""Write and read the prefix index in Redis: one stream of KV events for each shard, one snapshot for each worker.

Every command has one key, so Redis Cluster may put each key on any node:

    {namespace:index:SHARD}        stream of the events of a shard's workers, trimmed to about `MAX_ENTRIES`
    {namespace:index:w:ID}:blocks  snapshot of a worker's blocks, written by that worker alone; expires unless renewed
    {namespace:index:w:ID}:want    "incarnation:number": a gateway requests a snapshot of at least that many events

Events are numbered, so writing an entry twice does no harm: an entry that may have been lost is written again. Readers
(`gateway.prefix.prefix_index_client`) apply events and snapshots; this module only moves them.

An entry of a stream: version, incarnation, number of its first event, length of the worker's id, the id, and the events
as words. A snapshot: version, incarnation, the number of events that it includes, the number of blocks for which its
reader reserves memory (`IndexSnapshot.capacity`), and the words of the blocks that it lists. Integers are
little-endian, a word is 8 bytes (`kv.kv_event_codec`). An event ("fact" in names of fields) states that a block was
stored or evicted.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import sys
from array import array
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.kv.kv_event_codec import WORD_BYTES
from tandem.kv.kv_event_log import KVEventBatch
from tandem.routing.kv_indexer import WorkerKVEvents
from tandem.stores.redis_client import RedisClient, RedisHealth

NUM_SHARDS = 16
"""Number of streams. It cannot be changed in a running cluster: writers and readers must agree on it."""
MAX_ENTRIES = 4096
"""Entries kept in one shard's stream: about 5 s of 16 workers at 20 ms per entry. Older events are in a snapshot."""
MAX_FACTS = 128
"""Largest number of KV events in one entry: 1 KiB, so a stream holds at most 5 MiB."""
READ_ENTRIES = 256
"""Largest number of entries of one stream that one `IndexReader.read` returns."""
SNAPSHOT_TTL_S = 30.0
REQUEST_TTL_S = 10.0
"""A gateway's request for a snapshot expires after this many seconds."""
STREAM_TTL_S = 3600.0
"""A stream to which no worker has written for this long is deleted, since its namespace is not in use any more."""
_FIELD = b"f"
VERSION = 1
_ENTRY = struct.Struct("<BQQB")
_SNAPSHOT = struct.Struct("<BQQQ")
_log = logging.getLogger(__name__)


class IndexFormatError(Exception):
    """Raised for bytes that are no stream entry or snapshot of the prefix index that this version can read."""


class IndexSnapshot(NamedTuple):
    """Hold the blocks that one worker process caches after the first `number` of its KV events.

    With `redis.index_stride` = n, only every n-th block of a prefix is listed. `incarnation`: that of the worker.
    `capacity`: number of blocks for which a reader should reserve memory: the blocks that the worker can hold in device
    and host memory, divided by n. More can be listed where prefixes share the blocks that are left out. `words`: one
    64-bit word for each listed block (`kv.kv_event_codec`), in no particular order.
    """

    incarnation: Incarnation
    number: int
    capacity: int
    words: array[int]


def shard_of(worker: WorkerId) -> int:
    """Return the index of the stream (0 to NUM_SHARDS - 1) to which a worker writes its KV events; equal in every
    process.
    """
    return int.from_bytes(hashlib.blake2b(worker.encode(), digest_size=8).digest(), "little") % NUM_SHARDS


class IndexWriter:
    """Write one worker process's part of the prefix index: its KV events as entries of a stream, and a snapshot of its
    blocks.

    `url`: as for `RedisClient`. `namespace`: prefix of the keys. `worker`: the worker process. `health`: receives the
    result of each command. All methods but `close` raise StoreUnavailable.
    """

    def __init__(self, url: str, namespace: str, worker: WorkerRef, *, health: RedisHealth | None = None) -> None:
        self._redis = RedisClient(url, store="index", health=health)
        self.close = self._redis.aclose
        self._worker = worker
        self._stream = _stream(namespace, shard_of(worker.id))
        self._snapshot_key = _snapshot_key(namespace, worker.id)
        self._request_key = _request_key(namespace, worker.id)

    async def append(self, entries: Sequence[WorkerKVEvents]) -> None:
        """Append entries to the stream of this worker's shard, in order.

        After StoreUnavailable, the first few of them may have been written; writing an entry again does no harm.
        """
        async with _pipeline(self._redis, "XADD") as pipe:
            for entry in entries:
                pipe.xadd(self._stream, {_FIELD: pack_entry(entry)}, maxlen=MAX_ENTRIES, approximate=True)
            pipe.pexpire(self._stream, _ms(STREAM_TTL_S))
            await pipe.execute()

    async def write(self, snapshot: IndexSnapshot) -> None:
        """Replace this worker's snapshot, which expires after SNAPSHOT_TTL_S unless it is renewed."""
        await self._redis.execute("SET", self._snapshot_key, pack_snapshot(snapshot), "PX", _ms(SNAPSHOT_TTL_S))

    async def renew(self) -> int | None:
        """Let this worker's snapshot expire SNAPSHOT_TTL_S seconds from now, and return how many KV events the next
        snapshot must include.

        This number comes from a gateway that requested a snapshot; it is 0 where no gateway requests one of this worker
        process. Returns None where Redis has no snapshot of this worker, so that a new one must be written.
        """
        async with _pipeline(self._redis, "PEXPIRE") as pipe:
            pipe.pexpire(self._snapshot_key, _ms(SNAPSHOT_TTL_S))
            pipe.get(self._request_key)
            is_there, request = await pipe.execute()
        return self._requested_number(request) if is_there else None

    async def withdraw(self) -> None:
        """Delete the snapshot of a worker that shuts down."""
        await self._redis.execute("DEL", self._snapshot_key)

    def _requested_number(self, request: bytes | None) -> int:
        """Return the number of events in a request; 0 if there is none for this incarnation of the worker."""
        incarnation, _, number = (request or b"").partition(b":")
        return int(number) if incarnation == str(self._worker.incarnation).encode() and number.isdigit() else 0


class IndexReader:
    """Read the KV events and snapshots of all workers for one gateway. The reader remembers the position up to which it
    has read each stream.

    `url`: as for `RedisClient`. `namespace`: prefix of the keys. `health`: receives the result of each command. All
    methods but `close` raise StoreUnavailable.
    """

    def __init__(self, url: str, namespace: str, *, health: RedisHealth | None = None) -> None:
        self._redis = RedisClient(url, store="index", health=health)
        self.close = self._redis.aclose
        self._namespace = namespace
        self._streams = [_stream(namespace, shard) for shard in range(NUM_SHARDS)]
        self._after = [b"0-0"] * NUM_SHARDS
        self._has_unreadable = False

    async def read(self) -> tuple[list[WorkerKVEvents], bool]:
        """Return the entries appended to all streams since the last call, and whether more entries may be there; does
        not wait for entries.

        At most `READ_ENTRIES` of each stream are returned. Entries of one worker are in order; those that this version
        cannot read are left out. After StoreUnavailable, the next call starts with the oldest entries that exist,
        because another server with other stream positions may answer by then.
        """
        try:
            async with _pipeline(self._redis, "XREAD") as pipe:
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
        """Return the latest snapshot of a worker, of whichever incarnation; None where there is none that this version
        can read.
        """
        raw = await self._redis.execute("GET", _snapshot_key(self._namespace, worker))
        try:
            return None if raw is None else unpack_snapshot(raw)
        except IndexFormatError as error:
            self._warn_once(error)
            return None

    async def request_snapshot(self, worker: WorkerRef, number: int) -> None:
        """Request that `worker` writes a snapshot that includes at least its first `number` KV events.

        The request replaces that of any other gateway for this worker. It expires after REQUEST_TTL_S seconds, so
        repeat it until the snapshot is there.
        """
        key = _request_key(self._namespace, worker.id)
        await self._redis.execute("SET", key, f"{worker.incarnation}:{number}", "PX", _ms(REQUEST_TTL_S))

    def _readable(self, raws: Iterable[bytes]) -> list[WorkerKVEvents]:
        entries: list[WorkerKVEvents] = []
        for raw in raws:
            try:
                entries.append(unpack_entry(raw))
            except IndexFormatError as error:
                self._warn_once(error)
        return entries

    def _warn_once(self, error: IndexFormatError) -> None:
        """Log the first value that cannot be read; another version may write many of them."""
        if not self._has_unreadable:
            _log.warning("the prefix index has entries that this version cannot read and ignores: %s", error)
        self._has_unreadable = True


def _stream(namespace: str, shard: int) -> str:
    return f"{{{namespace}:index:{shard}}}"


def _snapshot_key(namespace: str, worker: WorkerId) -> str:
    return f"{{{namespace}:index:w:{worker}}}:blocks"


def _request_key(namespace: str, worker: WorkerId) -> str:
    return f"{{{namespace}:index:w:{worker}}}:want"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


@asynccontextmanager
async def _pipeline(client: RedisClient, command: str) -> AsyncGenerator[Any, None]:
    """Open a pipeline in a command scope: opening may fail too, because a cluster client first loads the slot table."""
    async with client.command_scope(command), client.redis.pipeline(transaction=False) as pipe:
        yield pipe


def pack_entry(entry: WorkerKVEvents) -> bytes:
    """Encode a batch of a worker's KV events as an entry of a stream."""
    name = entry.worker.encode()
    return _ENTRY.pack(VERSION, entry.incarnation, entry.facts.first, len(name)) + name + _bytes(entry.facts.words)


def unpack_entry(raw: bytes) -> WorkerKVEvents:
    """Decode an entry of a stream into a batch of a worker's KV events. Raises IndexFormatError where this version
    cannot read it.
    """
    version, incarnation, first, length = _head(_ENTRY, raw)
    start = _ENTRY.size + length
    if version != VERSION or start > len(raw):
        raise IndexFormatError(f"an entry of version {version} and {len(raw)} bytes")
    try:
        name = raw[_ENTRY.size : start].decode()
    except UnicodeDecodeError as error:
        raise IndexFormatError(f"an entry's worker: {error}") from None
    return WorkerKVEvents(WorkerId(name), Incarnation(incarnation), KVEventBatch(first, _words(raw[start:])))


def pack_snapshot(snapshot: IndexSnapshot) -> bytes:
    """Encode a snapshot of a worker's blocks."""
    head = _SNAPSHOT.pack(VERSION, snapshot.incarnation, snapshot.number, snapshot.capacity)
    return head + _bytes(snapshot.words)


def unpack_snapshot(raw: bytes) -> IndexSnapshot:
    """Decode a snapshot of a worker's blocks. Raises IndexFormatError where this version cannot read it."""
    version, incarnation, number, capacity = _head(_SNAPSHOT, raw)
    if version != VERSION:
        raise IndexFormatError(f"a snapshot of version {version}")
    return IndexSnapshot(Incarnation(incarnation), number, capacity, _words(raw[_SNAPSHOT.size :]))


def _head(form: struct.Struct, raw: bytes) -> tuple[int, ...]:
    if len(raw) < form.size:
        raise IndexFormatError(f"{len(raw)} bytes are too few")
    return form.unpack_from(raw)


def _words(raw: bytes) -> array[int]:
    if len(raw) % WORD_BYTES:
        raise IndexFormatError(f"{len(raw)} bytes are not a whole number of words")
    words = array("Q", raw)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _bytes(words: array[int]) -> bytes:
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words.tobytes()
