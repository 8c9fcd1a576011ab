"""Transport between workers of one host that reads the peer's memory with process_vm_readv."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer, TransportRank
from tandem.transfer.interface import BlockCopy, PeerError, PostedRead, ReadState
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.peer_layout import RankShare, check_copies, check_peer, decode_metadata, shares_of
from tandem.transfer.process_identity import host_identity, start_ticks
from tandem.transfer.process_memory import MAX_SPANS, CopySpan, ProcessMemory

NONCE_BYTES = 16


class _Target(msgspec.Struct, frozen=True, array_like=True):
    """The process of a peer's transport, and the address of the nonce that proves that it is still that transport.

    `host`: text that is equal only for processes that can address each other by pid (`host_identity`). `start_ticks`:
    start time of the process `pid`, which shows whether the pid was given to another process. `nonce`: as hex digits.
    """

    host: str
    pid: Annotated[int, msgspec.Meta(ge=1)]
    start_ticks: int
    nonce_address: Annotated[int, msgspec.Meta(ge=1)]
    nonce: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * NONCE_BYTES}}}$")]


class _EndedRead:
    """Represent a read that has ended, as each read has when it is posted."""

    def poll(self) -> ReadState:
        return ReadState.DONE


class ProcessVmTransport:
    """Read blocks of workers on the same host by process_vm_readv, synchronously: a read is over when `post_read`
    returns, even if the peer's process is stopped.

    A pid and an address can be reused, so each read proves whose memory it reads: 16 random bytes (the nonce), which
    exist only as long as the peer's transport, are read in the same call before and after the blocks. Blocks of this
    process itself are read by the same call, so that an unmapped source is an error and not a crash. Raises
    TandemError(UNSUPPORTED) for a pool in GPU memory and on platforms without process_vm_readv.
    """

    def __init__(self, pool: MemoryPool, agent: str) -> None:
        if pool.region.device != "cpu":
            raise TandemError(
                ErrorKind.UNSUPPORTED,
                f"the local transport reads cpu memory, not {pool.region.device}: set transfer.backend to auto",
                param="transfer.backend",
            )
        self._nonce = ctypes.create_string_buffer(secrets.token_bytes(NONCE_BYTES), NONCE_BYTES)
        nonce_address, pid = ctypes.addressof(self._nonce), os.getpid()
        try:
            self._memory = ProcessMemory()
            self._own = _Target(host_identity(), pid, start_ticks(pid), nonce_address, self._nonce.raw.hex())
        except OSError as error:
            raise TandemError(
                ErrorKind.UNSUPPORTED,
                f"the local transport needs Linux ({error}): set transfer.backend to auto",
                param="transfer.backend",
            ) from error
        self._memory.allow_readers()
        self.pool = pool
        self._block_bytes = pool.region.block_bytes
        self._agent = agent
        self._seen = ctypes.create_string_buffer(2 * NONCE_BYTES)
        # Of each connected peer: the share of our blocks that each of its ranks holds, and the process of that rank.
        self._sources: dict[tuple[WorkerId, Incarnation], list[tuple[RankShare, _Target]]] = {}

    def __repr__(self) -> str:
        return f"ProcessVmTransport({self._agent}, peers={[worker for worker, _ in self._sources]})"

    def describe(self, worker: WorkerRef) -> TransportPeer:
        """Return what other workers need to read this rank's pool: the agent's name, the process, the nonce and the
        memory region. `worker`: identity of this worker, which the description contains. The result is constant, so any
        thread may call this."""
        rank = TransportRank(self._agent, msgspec.json.encode(self._own), self.pool.region)
        return TransportPeer(worker, self.pool.layout, (rank,))

    def connect(self, peer: TransportPeer) -> None:
        check_peer(self.pool, peer)
        sources = [(share, self._target(peer, share.rank)) for share in shares_of(self.pool, peer)]
        for _, target in sources:
            self._read(peer, target, [])
        self._sources[peer.life] = sources

    def disconnect(self, peer: TransportPeer) -> bool:
        """Forget the peer, if it is connected. Always returns True, because no read goes on after `post_read` has
        returned."""
        self._sources.pop(peer.life, None)
        return True

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> PostedRead:
        sources = self._sources.get(peer.life)
        if sources is None:
            raise PeerError(f"{peer.worker} is not connected")
        check_copies(self.pool, peer, copies)
        for share, target in sources:
            self._read(peer, target, list(self._spans(share, copies)))
        return _EndedRead()

    def progress(self) -> None:
        """Do nothing: peers read this worker's memory without its help."""

    def enter_thread(self) -> None:
        """Do nothing: any thread may read host memory."""

    def post_self_test(self) -> PostedRead:
        self._probe(f"process {self._own.pid} (itself)", self._own, [])
        return _EndedRead()

    def close(self) -> None:
        """Disconnect all peers and clear the nonce, so that other workers' reads of this one fail even while its
        process lives."""
        self._sources.clear()
        ctypes.memset(self._nonce, 0, NONCE_BYTES)

    def _target(self, peer: TransportPeer, rank: TransportRank) -> _Target:
        """Return the process that a rank's metadata names. Raises PeerError unless that process is still running."""
        target = decode_metadata(peer, rank, _Target, "local")
        if target.host != self._own.host:
            raise PeerError(f"{peer.worker} is not on this host: set transfer.backend to auto")
        try:
            alive = start_ticks(target.pid) == target.start_ticks
        except ProcessLookupError:
            alive = False
        except OSError as error:  # for example where /proc hides processes of other users
            raise PeerError(f"{peer.worker}: {error}") from None
        if not alive:
            raise PeerError(f"{peer.worker} is gone: pid {target.pid} is another process or none")
        return target

    def _spans(self, share: RankShare, copies: Sequence[BlockCopy]) -> Iterator[CopySpan]:
        """Yield one span per run of copies adjacent on both sides, or one per copy where the sides' heads differ."""
        theirs = share.rank.region.address + share.remote_offset
        size = share.num_bytes
        ours = self.pool.region.address + share.local_offset
        step = share.rank.region.block_bytes
        own_step = self._block_bytes
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
        """Copy the spans. An empty list only checks that the peer is still alive."""
        step = MAX_SPANS - 2
        for start in range(0, max(1, len(spans)), step):
            self._probe(str(peer.worker), target, spans[start : start + step])

    def _probe(self, name: str, target: _Target, spans: list[CopySpan]) -> None:
        """Copy the spans between two reads of the nonce. Raises PeerError unless both return the peer's nonce."""
        seen = ctypes.addressof(self._seen)
        before = CopySpan(target.nonce_address, seen, NONCE_BYTES)
        after = CopySpan(target.nonce_address, seen + NONCE_BYTES, NONCE_BYTES)
        try:
            self._memory.read(target.pid, [before, *spans, after])
        except ProcessLookupError:
            raise PeerError(f"{name} is gone: no process {target.pid}") from None
        except PermissionError:
            raise PeerError(
                f"{name} may not be read: workers on one host must run as one user, "
                "and a container's security profile must allow process_vm_readv"
            ) from None
        except OSError as error:
            raise PeerError(f"{name} is gone: {error}") from None
        if self._seen.raw != bytes.fromhex(target.nonce) * 2:
            raise PeerError(f"{name} is gone: another incarnation uses its memory")
