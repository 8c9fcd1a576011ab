"""The transport between workers of one host: reads the other process's memory; never reaches another host."""

from __future__ import annotations

import ctypes
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.engine.ports import BlockCopy, PeerError, ReadState, TransportPeer, TransportRank
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.peer_layout import RankShare, check_copies, check_peer, shares_of
from tandem.transfer.process_identity import ProcessIdentity, start_ticks, this_process
from tandem.transfer.process_memory import MAX_SPANS, CopySpan, ProcessMemory

NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Target:
    """The other end: its process, and where in its memory the nonce of this very transport lies."""

    process: ProcessIdentity
    nonce_address: int
    nonce: bytes

    def to_bytes(self) -> bytes:
        process = self.process
        fields = (process.host, process.pid, process.start_ticks, self.nonce_address, self.nonce.hex())
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, metadata: bytes) -> _Target:
        """Raises ValueError when the bytes are not those of a local transport."""
        try:
            host, pid, ticks, address, nonce = json.loads(metadata)
            target = cls(ProcessIdentity(str(host), int(pid), int(ticks)), int(address), bytes.fromhex(nonce))
        except (TypeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if len(target.nonce) != NONCE_BYTES or target.process.pid < 1 or target.nonce_address < 1:
            raise ValueError("a field is out of range")
        return target


@dataclass(frozen=True, slots=True)
class _Link:
    """A peer that is connected, and which of its ranks, whose process is known, holds what of our blocks."""

    peer: TransportPeer
    sources: tuple[tuple[RankShare, _Target], ...]


class ProcessVmTransport:
    """Blocks by process_vm_readv; a read is over when `post_read` returns, whatever the peer does, stopped or not.

    A pid and an address can be recycled, so the reader proves whose memory it reads: 16 random bytes that live only
    as long as the peer's transport are read in the same call before and after the blocks. Also reaches transports
    of its own process, by the same path: an unmapped source is then an error and not a crash.
    """

    def __init__(self, pool: MemoryPool, agent: str) -> None:
        if pool.device != "cpu":
            raise TandemError(
                ErrorKind.UNSUPPORTED,
                f"the local transport reads cpu memory, not {pool.device}: set handoff.transport to nixl",
                param="handoff.transport",
            )
        try:
            self._memory = ProcessMemory()
            process = this_process()
        except OSError as error:
            raise TandemError(
                ErrorKind.UNSUPPORTED,
                f"the local transport needs Linux ({error}): set handoff.transport to nixl",
                param="handoff.transport",
            ) from error
        self._memory.allow_readers()
        self.pool = pool
        self._block_bytes = pool.block_bytes
        self._agent = agent
        self._nonce = ctypes.create_string_buffer(secrets.token_bytes(NONCE_BYTES), NONCE_BYTES)
        self._seen = ctypes.create_string_buffer(2 * NONCE_BYTES)
        self._own = _Target(process, ctypes.addressof(self._nonce), self._nonce.raw)
        self._links: dict[tuple[WorkerId, Incarnation], _Link] = {}
        self._handles = count(1)
        self._done: set[int] = set()

    def __repr__(self) -> str:
        return f"LocalTransport({self._agent}, peers={[str(link.peer.worker) for link in self._links.values()]})"

    def describe(self, worker: WorkerRef) -> TransportPeer:
        """Our side of the handshake; constant, so any thread may call it."""
        rank = TransportRank(self._agent, self._own.to_bytes(), self.pool.region())
        return TransportPeer(worker, self.pool.layout, (rank,))

    def connect(self, peer: TransportPeer) -> None:
        check_peer(self.pool, peer)
        for link in list(self._links.values()):
            if link.peer.worker.id == peer.worker.id:
                self.disconnect(link.peer)
        link = _Link(peer, tuple((share, self._target(peer, share.rank)) for share in shares_of(self.pool, peer)))
        for _, target in link.sources:
            self._read(peer, target, [])
        self._links[peer.life] = link

    def disconnect(self, peer: TransportPeer) -> bool:
        """Always True: no read outlives `post_read`."""
        self._links.pop(peer.life, None)
        return True

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> int:
        link = self._links.get(peer.life)
        if link is None:
            raise PeerError(f"{peer.worker} is not connected")
        check_copies(self.pool, peer, copies)
        for share, target in link.sources:
            self._read(peer, target, list(self._spans(share, copies)))
        return self._finished_handle()

    def poll(self, handle: int) -> ReadState:
        self._done.remove(handle)
        return ReadState.DONE

    def progress(self) -> None:
        """Readers need no help of ours."""

    def enter_thread(self) -> None:
        """Any thread reads host memory."""

    def post_self_test(self) -> int:
        me = self._own.process
        self._probe(f"process {me.pid} (itself)", self._own, [])
        return self._finished_handle()

    def close(self) -> None:
        """Peers that read from us notice from now on, even while this process lives."""
        self._links.clear()
        ctypes.memset(self._nonce, 0, NONCE_BYTES)

    def _finished_handle(self) -> int:
        handle = next(self._handles)
        self._done.add(handle)
        return handle

    def _target(self, peer: TransportPeer, rank: TransportRank) -> _Target:
        """Who the metadata names, if that process still is who it was."""
        try:
            target = _Target.from_bytes(rank.metadata)
        except ValueError as error:
            raise PeerError(f"{peer.worker} is no local transport: {error}") from None
        process = target.process
        if process.host != self._own.process.host:
            raise PeerError(f"{peer.worker} is not on this host: set handoff.transport to nixl")
        try:
            alive = start_ticks(process.pid) == process.start_ticks
        except ProcessLookupError:
            alive = False
        except OSError as error:  # as where processes of other users cannot be looked at
            raise PeerError(f"{peer.worker}: {error}") from None
        if not alive:
            raise PeerError(f"{peer.worker} is gone: pid {process.pid} is another process or none")
        return target

    def _spans(self, share: RankShare, copies: Sequence[BlockCopy]) -> Iterator[CopySpan]:
        """One span per run of copies that are neighbours on both sides; one per copy where a side has more heads."""
        theirs, size = share.rank.region.address + share.remote_offset, share.num_bytes
        ours, step, own_step = self.pool.address + share.local_offset, share.rank.region.block_bytes, self._block_bytes
        start = 0
        for stop in range(1, len(copies) + 1):
            if stop < len(copies) and share.is_whole:
                before, after = copies[stop - 1], copies[stop]
                if after.remote == before.remote + 1 and after.local == before.local + 1:
                    continue
            first = copies[start]
            yield CopySpan(theirs + first.remote * step, ours + first.local * own_step, (stop - start) * size)
            start = stop

    def _read(self, peer: TransportPeer, target: _Target, spans: list[CopySpan]) -> None:
        """Copy the spans; no spans only check that the peer still is who it was."""
        step = MAX_SPANS - 2
        for start in range(0, max(1, len(spans)), step):
            self._probe(str(peer.worker), target, spans[start : start + step])

    def _probe(self, name: str, target: _Target, spans: list[CopySpan]) -> None:
        """Copy the spans between two looks at the nonce. Raises PeerError when either look shows another life."""
        seen = ctypes.addressof(self._seen)
        before = CopySpan(target.nonce_address, seen, NONCE_BYTES)
        after = CopySpan(target.nonce_address, seen + NONCE_BYTES, NONCE_BYTES)
        try:
            self._memory.read(target.process.pid, [before, *spans, after])
        except ProcessLookupError:
            raise PeerError(f"{name} is gone: no process {target.process.pid}") from None
        except PermissionError:
            raise PeerError(
                f"{name} may not be read: workers on one host must run as one user, "
                "and a container's security profile must allow process_vm_readv"
            ) from None
        except OSError as error:
            raise PeerError(f"{name} is gone: {error}") from None
        if self._seen.raw != target.nonce * 2:
            raise PeerError(f"{name} is gone: another life uses its memory")
