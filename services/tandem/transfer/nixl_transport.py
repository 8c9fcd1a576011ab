"""Move KV blocks over NIXL. Its backend UCX moves them over RDMA, CUDA IPC, shared memory or TCP, whichever UCX
chooses; its backend LIBFABRIC moves them over AWS' EFA, which has not been tried."""

from __future__ import annotations

import ctypes
import gc
import secrets
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer, TransportRank
from tandem.kv.layout import KVRegion
from tandem.transfer.cuda_driver import CudaDriver
from tandem.transfer.interface import BlockCopy, PeerError, PostedRead, ReadState
from tandem.transfer.memory_pool import MemoryPool, cuda_number
from tandem.transfer.nixl_agent import UCX, NixlAgent, open_agent
from tandem.transfer.peer_layout import RankShare, check_copies, check_peer, shares_of

PROBE_BYTES = 4096
_AFTER_BACKEND = b"\0"
_INITIATOR = "NIXL_INIT_AGENT"


@dataclass(frozen=True, slots=True)
class _Source:
    """A rank of a peer whose metadata is loaded into the agent.

    `agent`: name of the rank's agent. `theirs`, `ours`: prepared descriptor lists, with one descriptor for each block
    of the rank's pool and of the local pool. A descriptor covers the KV heads of the block that both pools hold.
    """

    agent: str
    theirs: Any
    ours: Any


@dataclass(slots=True)
class _Link:
    """A peer whose ranks are loaded into the agent.

    `leaving`: torn down, but some read is not proven to have ended. `tainted`: a post failed half-way and left nothing
    to poll, so nothing but `close` can prove that its read has ended.
    """

    peer: TransportPeer
    sources: tuple[_Source, ...]
    leaving: bool = False
    tainted: bool = False


@dataclass(slots=True, eq=False)
class _Read:
    """Describe one read of a peer, or a self-test.

    `peer`: None for a self-test. `transfers`: the open transfers, one for each rank of the peer that holds some of the
    local heads. `content`: what a self-test must have read. `failed`: a transfer was cut off by a disconnect.
    """

    transport: NixlTransport
    peer: TransportPeer | None
    transfers: list[Any]
    content: bytes = b""
    failed: bool = False

    def poll(self) -> ReadState:
        return self.transport.poll(self)


class NixlTransport:
    """Read blocks of peers through one NIXL agent, into one pool that is registered with the agent. It prepares a list
    of NIXL descriptors (addresses and sizes of all blocks) once per peer, and each read names indices in it.

    Raises TandemError(UNSUPPORTED) when the pool cannot be registered or shared. NIXL merges descriptors of adjacent
    blocks itself. A read of a peer with several ranks is over when it is over at each of them; when a transfer from one
    rank is cut off, the whole peer is lost.

    When memory under a read is safe to reuse: a handle that reports DONE has ended. A handle that raises the disconnect
    error has ended too, because UCX closed the endpoint by force and purged its requests. Releasing an unfinished
    handle or removing the remote agent proves nothing: both return immediately, but UCX closes only after a flush, and
    a stopped peer that resumes still fills the memory (measured over TCP). So `disconnect` keeps unfinished handles and
    the remote agent until each handle has ended, and returns False until then. Destroying the own agent, as `close`
    does, ends every read.

    When a GPU kernel may use what was read into GPU memory: when the kernel is launched after the poll that returned
    DONE. Within a machine, DONE means that UCX has seen the event behind its copy; over RDMA, work that the host
    submits after the last write has completed sees that write (CUDA's GPUDirect RDMA guide, on memory ordering). So no
    stream has to wait for the transfer, and a kernel that is already running must not be given the block.

    NIXL does not protect from two things. Memory that a live peer has reused or deregistered is read without an error:
    leases and digests guard against that. And UCX answers a TCP read in the peer's own polling, and aborts the peer's
    process when the reader dies during the read: a reader should end its reads before it exits.
    """

    def __init__(self, pool: MemoryPool, agent: str, backends: Sequence[str] = (UCX,)) -> None:
        self.pool = pool
        memory, number = memory_type(pool.region.device)
        self._driver = CudaDriver() if memory == "VRAM" else None
        self.enter_thread()
        if self._driver is not None and not self._driver.can_share(pool.region.address):
            raise TandemError(
                ErrorKind.UNSUPPORTED,
                f"KV memory of {pool.region.device} cannot be shared with other processes: "
                "remove expandable_segments and other allocators from PYTORCH_CUDA_ALLOC_CONF",
                param="device",
            )
        self._nixl: NixlAgent = open_agent(agent, backends, uses_cuda=memory == "VRAM")
        self._api: Any = self._nixl.api
        self._probe = ctypes.create_string_buffer(2 * PROBE_BYTES)
        self._probe_lists: tuple[Any, Any] | None = None
        self._links: dict[tuple[WorkerId, Incarnation], _Link] = {}
        self._own_lists: dict[tuple[int, int], Any] = {}
        self._reads: set[_Read] = set()
        probe_address = ctypes.addressof(self._probe)
        try:
            self._api.register_memory([(pool.region.address, pool.num_bytes, number, "")], memory)
            self._api.register_memory([(probe_address, 2 * PROBE_BYTES, 0, "")], "DRAM")
            self._own_lists[0, pool.region.block_bytes] = self._prepare(
                _INITIATOR, pool.region, 0, pool.region.block_bytes
            )
            self._metadata: bytes = self.backend.encode() + _AFTER_BACKEND + self._api.get_agent_metadata()
        except self._nixl.errors as error:
            raise TandemError(
                ErrorKind.UNSUPPORTED,
                f"NIXL cannot register the KV pool of {pool.num_bytes >> 20} MiB on {pool.region.device}: {error}; "
                "`tandem doctor` checks the limit of locked memory",
            ) from error

    def __repr__(self) -> str:
        links = ", ".join(
            f"{link.peer.worker}:{len(self._reads_of(link))}{' leaving' if link.leaving else ''}"
            for link in self._links.values()
        )
        return f"NixlTransport({self._nixl.name}, {links or 'no peers'})"

    @property
    def backend(self) -> str:
        """Return the name of NIXL's backend, which every peer must use too."""
        return self._nixl.backend

    def describe(self, worker: WorkerRef) -> TransportPeer:
        """Return what other workers need to read this rank's pool: the agent's name, the backend with NIXL's metadata,
        and the memory region. `worker`: identity of this worker, which the description contains. The result is
        constant, so any thread may call this."""
        rank = TransportRank(self._nixl.name, self._metadata, self.pool.region)
        return TransportPeer(worker, self.pool.layout, (rank,))

    def connect(self, peer: TransportPeer) -> None:
        check_peer(self.pool, peer)
        if peer.life in self._links:
            raise PeerError(f"a read of {peer.worker} from before its teardown is still not proven to have ended")
        sources: list[_Source] = []
        try:
            for share in shares_of(self.pool, peer):
                sources.append(self._load(peer, share))
        except PeerError:
            self._unload(sources)
            raise
        self._links[peer.life] = _Link(peer, tuple(sources))

    def disconnect(self, peer: TransportPeer) -> bool:
        """Tear the peer down, and return whether all reads from it are proven to have ended. If the result is False,
        the caller must call again until it is True; until then `connect` of this peer raises PeerError. Returns True
        for a peer that is not connected."""
        link = self._links.get(peer.life)
        if link is None:
            return True
        link.leaving = True
        for read in self._reads_of(link):
            with suppress(PeerError):  # then the read is still in doubt
                self.poll(read)
        if self._reads_of(link) or link.tainted:
            return False
        del self._links[peer.life]
        self._unload(link.sources)
        return True

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> PostedRead:
        link = self._links.get(peer.life)
        if link is None or link.leaving:
            raise PeerError(f"{peer.worker} is not connected")
        check_copies(self.pool, peer, copies)
        ours = np.fromiter((copy.local for copy in copies), np.int32, len(copies))
        theirs = np.fromiter((copy.remote for copy in copies), np.int32, len(copies))
        read = _Read(self, link.peer, [])
        self._reads.add(read)
        for source in link.sources:
            try:
                transfer = self._api.make_prepped_xfer("READ", source.ours, ours, source.theirs, theirs)
            except self._nixl.errors as error:
                raise PeerError(f"{peer.worker} cannot be read: {error}") from error
            self._post(link, transfer)
            read.transfers.append(transfer)
        return read

    def poll(self, read: _Read) -> ReadState:
        """Return the state of a read, FAILED only once none of its transfers is open. Raises PeerError when one of them
        failed without proof that it has ended."""
        for transfer in list(read.transfers):
            state = self._state("this worker" if read.peer is None else str(read.peer.worker), transfer)
            if state is not ReadState.PENDING:
                read.failed |= state is ReadState.FAILED
                read.transfers.remove(transfer)
                transfer.release()
        if read.transfers:
            return ReadState.PENDING
        self._reads.discard(read)
        is_intact = read.peer is not None or self._probe.raw[PROBE_BYTES:] == read.content
        return ReadState.DONE if is_intact and not read.failed else ReadState.FAILED

    def progress(self) -> None:
        """Poll UCX once, which also answers peers that read from this worker over TCP."""
        self._api.get_new_notifs()

    def enter_thread(self) -> None:
        """Make the CUDA context of the pool's device current for the calling thread, because UCX needs it to register
        GPU memory or to look at a peer's. Does nothing for a pool in host memory."""
        if self._driver is not None:
            self._driver.enter(memory_type(self.pool.region.device)[1])

    def post_self_test(self) -> PostedRead:
        content = secrets.token_bytes(PROBE_BYTES)
        address = ctypes.addressof(self._probe)
        ctypes.memmove(address, content, PROBE_BYTES)
        ctypes.memset(address + PROBE_BYTES, 0, PROBE_BYTES)
        try:
            if self._probe_lists is None:
                halves = KVRegion(address, 2, PROBE_BYTES, 0, 1)
                target = self._prepare(_INITIATOR, halves, 0, PROBE_BYTES)
                self._probe_lists = (target, self._prepare(self._nixl.name, halves, 0, PROBE_BYTES))
            target, source = self._probe_lists
            transfer = self._api.make_prepped_xfer("READ", target, [1], source, [0])
            self._api.transfer(transfer)
        except self._nixl.errors as error:
            raise PeerError(f"the transport cannot read its own memory: {error}") from error
        read = _Read(self, None, [transfer], content)
        self._reads.add(read)
        return read

    def close(self) -> None:
        """Destroy the NIXL agent with its connections, which ends every read. A second call does nothing.

        Raises PeerError when something else still refers to the agent and so keeps it alive, because its reads may go
        on then.
        """
        if self._api is None:
            return
        alive = weakref.ref(self._api.agent)
        self._links.clear()
        for read in self._reads:
            read.transfers.clear()
        self._reads.clear()
        self._probe_lists = None
        self._own_lists.clear()
        self._api = None
        self._nixl = replace(self._nixl, api=None)
        if alive() is not None:
            # Objects from before serving are frozen, so a collection would not see them.
            gc.unfreeze()
            gc.collect()
        if alive() is not None:
            raise PeerError(f"agent {self._nixl.name} is still in use: its reads may go on")

    def _load(self, peer: TransportPeer, share: RankShare) -> _Source:
        """Load a rank's metadata into the agent and prepare its descriptor lists. Raises PeerError."""
        backend, metadata = split_metadata(share.rank.metadata)
        if backend != self.backend:
            theirs = backend or "no backend"
            raise PeerError(f"{peer.worker} uses {theirs} of NIXL, this worker {self.backend}: transfer.nixl_backends")
        try:
            name = self._api.add_remote_agent(metadata)
        except self._nixl.errors as error:
            raise PeerError(f"{peer.worker} cannot be reached: {error}") from error
        known = name.decode() if isinstance(name, bytes) else str(name)
        if known != share.rank.agent:
            self._unload([_Source(known, None, None)])
            raise PeerError(f"{peer.worker} says that it is agent {share.rank.agent}, its metadata says {known}")
        try:
            theirs = self._prepare(known, share.rank.region, share.remote_offset, share.num_bytes)
            return _Source(known, theirs, self._own_list(share))
        except self._nixl.errors as error:
            self._unload([_Source(known, None, None)])
            raise PeerError(f"{peer.worker} did not register the region that it describes: {error}") from error

    def _unload(self, sources: Sequence[_Source]) -> None:
        for source in sources:
            try:
                if source.theirs is not None:
                    source.theirs.release()
                self._api.remove_remote_agent(source.agent)
            except self._nixl.errors:
                # The peer is gone. That none of its reads is open was established before.
                continue

    def _own_list(self, share: RankShare) -> Any:
        """Return the descriptor list of the part of local blocks that a share fills; peers of equal layout reuse it."""
        part = (share.local_offset, share.num_bytes)
        if part not in self._own_lists:
            self._own_lists[part] = self._prepare(_INITIATOR, self.pool.region, *part)
        return self._own_lists[part]

    def _prepare(self, agent: str, region: KVRegion, offset: int, num_bytes: int) -> Any:
        """Prepare one descriptor per block of a region for the bytes `[offset, offset + num_bytes)` of the block."""
        memory, number = memory_type(region.device)
        strided = (region.address + offset, num_bytes, number, region.block_bytes, region.num_all_blocks)
        return self._api.prep_xfer_dlist(agent, np.array([strided], dtype=np.uint64), memory)

    def _post(self, link: _Link, read: Any) -> None:
        """Start a transfer, which may copy all bytes before it returns.

        Raises PeerError. Then nothing was read, or the link is marked as tainted.
        """
        try:
            state = self._api.transfer(read)
        except self._nixl.disconnected as error:
            raise PeerError(f"{link.peer.worker} is gone: {error}") from error
        except self._nixl.errors as error:
            link.tainted = True
            raise PeerError(f"{link.peer.worker} cannot be read: {error}") from error
        if state == "ERR":
            link.tainted = True
            raise PeerError(f"{link.peer.worker} cannot be read")

    def _state(self, name: str, transfer: Any) -> ReadState:
        """Return the state of a transfer. Raises PeerError when it failed without proof that it has ended."""
        try:
            word = self._api.check_xfer_state(transfer)
        except self._nixl.disconnected:
            return ReadState.FAILED
        except self._nixl.errors as error:
            raise PeerError(f"it is unknown whether a read of {name} has ended: {error}") from error
        if word == "ERR":
            raise PeerError(f"it is unknown whether a read of {name} has ended")
        return ReadState.DONE if word == "DONE" else ReadState.PENDING

    def _reads_of(self, link: _Link) -> list[_Read]:
        return [read for read in self._reads if read.peer is link.peer]


def split_metadata(metadata: bytes) -> tuple[str, bytes]:
    """Split a rank's metadata into two values, and return them: the name of NIXL's backend, and the metadata of NIXL
    itself. The name is empty where `metadata` names no backend."""
    backend, separator, rest = metadata.partition(_AFTER_BACKEND)
    return (backend.decode("ascii", "replace"), rest) if separator else ("", metadata)


def memory_type(device: str) -> tuple[str, int]:
    """Return NIXL's name for the memory of `device` and the device number: ("DRAM", 0) for `cpu`, ("VRAM", N) for
    `cuda:N`. Raises ValueError for other devices."""
    number = cuda_number(device)
    return ("DRAM", 0) if number is None else ("VRAM", number)
