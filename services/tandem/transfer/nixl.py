"""The transport over NIXL and UCX; never frees memory under a read that may still write to it."""

from __future__ import annotations

import ctypes
import gc
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerRef
from tandem.engine.ports import BlockCopy, PeerError, ReadState, TransportPeer
from tandem.transfer.nixl_library import NixlAgent, open_agent
from tandem.transfer.peers import check_copies, check_peer
from tandem.transfer.pool import MemoryPool

PROBE_BYTES = 4096
_INITIATOR = "NIXL_INIT_AGENT"


@dataclass(slots=True)
class _Link:
    """A peer that is loaded into the agent. `blocks` is its prepared list, one descriptor per block of its pool.

    `leaving`: torn down, but a read of it is not proven to have ended. `tainted`: a post failed half-way, which
    leaves nothing to poll, so that no proof will come before `close`.
    """

    peer: TransportPeer
    blocks: Any
    reads: dict[int, Any] = field(default_factory=dict)
    leaving: bool = False
    tainted: bool = False


class NixlTransport:
    """One NIXL agent, one registered pool; blocks by prepared descriptor lists, whose neighbours NIXL merges itself.

    When is memory under a read safe? A handle that reports DONE has ended. One that raises the disconnect error has
    ended too: UCX closed the endpoint by force and purged its requests. Releasing an unfinished handle and removing
    the agent proves nothing: both return at once, yet UCX only closes after a flush, and a stopped peer that
    wakes up still fills the memory (measured over TCP). So `disconnect` keeps unfinished handles and the agent
    until each has ended, and says False until then. Destroying our agent, as `close` does, ends everything.

    Two things NIXL does not protect from. Memory that a living peer has recycled, or deregistered, is read without
    an error: leases and digests are what guards it. And UCX answers a TCP read in the peer's own polling, where it
    aborts that process when the reader dies in the middle: a reader should end its reads before it goes.
    """

    def __init__(self, pool: MemoryPool, agent: str) -> None:
        self._pool = pool
        self._nixl: NixlAgent = open_agent(agent)
        self._api: Any = self._nixl.api
        self._probe = ctypes.create_string_buffer(2 * PROBE_BYTES)
        self._probe_lists: tuple[Any, Any] | None = None
        self._links: dict[str, _Link] = {}
        self._handles = count(1)
        self._owner: dict[int, _Link] = {}
        self._probes: dict[int, tuple[Any, bytes]] = {}
        memory, number = memory_type(pool.device)
        probe_address = ctypes.addressof(self._probe)
        try:
            self._api.register_memory([(pool.address, pool.num_bytes, number, "")], memory)
            self._api.register_memory([(probe_address, 2 * PROBE_BYTES, 0, "")], "DRAM")
            self._own_blocks = self._prepare(_INITIATOR, pool.address, pool.num_blocks, pool.device)
            self._metadata: bytes = self._api.get_agent_metadata()
        except self._nixl.errors as error:
            raise TandemError(
                ErrorKind.UNSUPPORTED, f"NIXL cannot register {pool.num_bytes} bytes of {pool.device} memory: {error}"
            ) from error

    def __repr__(self) -> str:
        links = ", ".join(
            f"{agent}:{len(link.reads)}{' leaving' if link.leaving else ''}" for agent, link in self._links.items()
        )
        return f"NixlTransport({self._nixl.name}, {links or 'no peers'})"

    def describe(self, worker: WorkerRef) -> TransportPeer:
        """Our side of the handshake; constant, so any thread may call it."""
        return TransportPeer(worker, self._nixl.name, self._metadata, self._pool.layout, (self._pool.region(),))

    def connect(self, peer: TransportPeer) -> None:
        check_peer(self._pool, peer)
        same = self._links.get(peer.agent)
        if same is not None and same.peer == peer and not same.leaving:
            return
        for link in list(self._links.values()):
            if link.peer.worker.id == peer.worker.id:
                self.disconnect(link.peer)
        if peer.agent in self._links:
            raise PeerError(f"a read of {peer.worker} from before its teardown is still not proven to have ended")
        self._links[peer.agent] = _Link(peer, self._load(peer))

    def disconnect(self, peer: TransportPeer) -> bool:
        """False while a read is not proven to have ended; call again. Until True the peer cannot be connected."""
        link = self._links.get(peer.agent)
        if link is None:
            return True
        link.leaving = True
        for handle in list(link.reads):
            if self._has_ended(link, handle):
                self._forget(link, handle)
        if link.reads or link.tainted:
            return False
        del self._links[peer.agent]
        self._unload(peer.agent, link.blocks)
        return True

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> int:
        link = self._links.get(peer.agent)
        if link is None or link.leaving:
            raise PeerError(f"{peer.worker} is not connected")
        check_copies(self._pool, peer, copies)
        ours = np.fromiter((copy.local for copy in copies), np.int32, len(copies))
        theirs = np.fromiter((copy.remote for copy in copies), np.int32, len(copies))
        try:
            read = self._api.make_prepped_xfer("READ", self._own_blocks, ours, link.blocks, theirs)
        except self._nixl.errors as error:
            raise PeerError(f"{peer.worker} cannot be read: {error}") from error
        self._post(link, read)
        handle = next(self._handles)
        link.reads[handle] = read
        self._owner[handle] = link
        return handle

    def poll(self, handle: int) -> ReadState:
        if handle in self._probes:
            return self._poll_probe(handle)
        link = self._owner[handle]
        state = self._state(f"{link.peer.worker}", link.reads[handle])
        if state is not ReadState.PENDING:
            self._forget(link, handle)
        return state

    def progress(self) -> None:
        """Also what answers peers that read from us over TCP: only their target's own polling moves those bytes."""
        self._api.get_new_notifs()

    def post_self_test(self) -> int:
        content = secrets.token_bytes(PROBE_BYTES)
        address = ctypes.addressof(self._probe)
        ctypes.memmove(address, content, PROBE_BYTES)
        ctypes.memset(address + PROBE_BYTES, 0, PROBE_BYTES)
        try:
            if self._probe_lists is None:
                source = self._prepare(self._nixl.name, address, 1, "cpu", PROBE_BYTES)
                target = self._prepare(_INITIATOR, address + PROBE_BYTES, 1, "cpu", PROBE_BYTES)
                self._probe_lists = (target, source)
            target, source = self._probe_lists
            read = self._api.make_prepped_xfer("READ", target, [0], source, [0])
            self._api.transfer(read)
        except self._nixl.errors as error:
            raise PeerError(f"the transport cannot read its own memory: {error}") from error
        handle = next(self._handles)
        self._probes[handle] = (read, content)
        return handle

    def close(self) -> None:
        """Destroys the agent with its endpoints; a second call does nothing.

        Raises PeerError when somebody else still refers to the agent, so that reads may go on.
        """
        if self._api is None:
            return
        alive = weakref.ref(self._api.agent)
        self._links.clear()
        self._owner.clear()
        self._probes.clear()
        self._probe_lists = None
        self._own_blocks = None
        self._api = None
        self._nixl = replace(self._nixl, api=None)
        if alive() is not None:
            # What was there when the process began to serve is left alone otherwise.
            gc.unfreeze()
            gc.collect()
        if alive() is not None:
            raise PeerError(f"agent {self._nixl.name} is still in use: its reads may go on")

    def _load(self, peer: TransportPeer) -> Any:
        """Make the peer known to the agent. Returns the prepared list of its blocks."""
        try:
            name = self._api.add_remote_agent(peer.metadata)
        except self._nixl.errors as error:
            raise PeerError(f"{peer.worker} cannot be reached: {error}") from error
        known = name.decode() if isinstance(name, bytes) else str(name)
        if known != peer.agent:
            self._unload(known, None)
            raise PeerError(f"{peer.worker} says that it is agent {peer.agent}, its metadata says {known}")
        (region,) = peer.regions
        try:
            return self._prepare(known, region.address, region.num_blocks, region.device)
        except self._nixl.errors as error:
            self._unload(known, None)
            raise PeerError(f"{peer.worker} did not register the region that it describes: {error}") from error

    def _unload(self, agent: str, blocks: Any) -> None:
        try:
            if blocks is not None:
                blocks.release()
            self._api.remove_remote_agent(agent)
        except self._nixl.errors:
            # Of a peer that is gone; what matters, that no read is open, was established before.
            return

    def _prepare(self, agent: str, address: int, num: int, device: str, num_bytes: int = 0) -> Any:
        """A list of `num` descriptors of one block (or of `num_bytes`) each, back to back."""
        memory, number = memory_type(device)
        size = num_bytes or self._pool.block_bytes
        strided = np.array([(address, size, number, size, num)], dtype=np.uint64)
        return self._api.prep_xfer_dlist(agent, strided, memory)

    def _post(self, link: _Link, read: Any) -> None:
        """May copy everything before it returns. After an error nothing was read, or the link is tainted."""
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

    def _state(self, name: str, read: Any) -> ReadState:
        """Raises PeerError when the read failed in a way that proves nothing."""
        try:
            word = self._api.check_xfer_state(read)
        except self._nixl.disconnected:
            return ReadState.FAILED
        except self._nixl.errors as error:
            raise PeerError(f"a read of {name} ended in doubt: {error}") from error
        if word == "ERR":
            raise PeerError(f"a read of {name} ended in doubt")
        return ReadState.DONE if word == "DONE" else ReadState.PENDING

    def _has_ended(self, link: _Link, handle: int) -> bool:
        try:
            return self._state(f"{link.peer.worker}", link.reads[handle]) is not ReadState.PENDING
        except PeerError:
            return False

    def _forget(self, link: _Link, handle: int) -> None:
        del self._owner[handle]
        link.reads.pop(handle).release()

    def _poll_probe(self, handle: int) -> ReadState:
        read, content = self._probes[handle]
        state = self._state("this worker", read)
        if state is ReadState.PENDING:
            return state
        del self._probes[handle]
        read.release()
        arrived = self._probe.raw[PROBE_BYTES:] == content
        return ReadState.DONE if arrived and state is ReadState.DONE else ReadState.FAILED


def memory_type(device: str) -> tuple[str, int]:
    """NIXL's name of a device's memory, and the device's number there."""
    kind, _, number = device.partition(":")
    if kind == "cpu" and not number:
        return ("DRAM", 0)
    if kind == "cuda":
        return ("VRAM", int(number or 0))
    raise ValueError(f"NIXL knows no memory of {device!r}")
