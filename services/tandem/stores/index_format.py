"""Encode and decode the values that the prefix index keeps in Redis.

An entry of a stream: version, incarnation, number of its first event, length of the worker's id, the id, and the events
as words. A snapshot: version, incarnation, the number of events that it includes, the number of blocks for which its
reader reserves memory (`IndexSnapshot.capacity`), and the words of the blocks that it lists. Integers are
little-endian, a word is 8 bytes (`kv.kv_event_codec`). An event ("fact" in names of fields) states that a block was
stored or evicted.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import NamedTuple

from tandem.core.ids import Incarnation, WorkerId
from tandem.kv.kv_event_codec import WORD_BYTES
from tandem.kv.kv_event_log import KVEventBatch
from tandem.routing.kv_indexer import WorkerKVEvents

VERSION = 1
_ENTRY = struct.Struct("<BQQB")
_SNAPSHOT = struct.Struct("<BQQQ")


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
