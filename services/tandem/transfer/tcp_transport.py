"""Transport over TCP connections of our own, which needs neither RDMA nor shared memory.

UCX over TCP aborts the process that is read from when its reader dies in mid-read, and lets it answer only while it
polls. Here both sides move bytes on threads of their own, and the end of a connection is an error and nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tandem.core.addresses import host_of
from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.transfer_messages import TransportPeer, TransportRank
from tandem.transfer.cuda_driver import CudaDriver
from tandem.transfer.interface import BlockCopy, PeerError, PostedRead, ReadState
from tandem.transfer.memory_pool import MemoryPool, cuda_number
from tandem.transfer.peer_layout import RankShare, check_copies, check_peer, decode_metadata, shares_of
from tandem.transfer.pool_access import HostAccess, open_access
from tandem.transfer.socket_memory import block_spans, span
from tandem.transfer.tcp_handshake import ConnectionSecurity
from tandem.transfer.tcp_reader import MAX_ADDRESSES, SourceAddress, SourceAddresses, TcpLink, TcpPiece, state_of
from tandem.transfer.tcp_source import MAX_RUNS, TEST_BYTES, TcpSource, request_blocks, request_test

if TYPE_CHECKING:
    import numpy.typing as npt

    from tandem.core.ids import Incarnation, WorkerId, WorkerRef

_log = logging.getLogger(__name__)
NUM_CONNECTIONS = 2
"""Connections to each address of each rank of a peer."""
_CONNECT_WAIT_S = 0.05
"""Seconds for which `connect` waits for the first connection, so that most errors are reported by it. A connection that
takes longer, for example because packets are lost, opens in the background."""
_END_WAIT_S = 0.02
_CLOSE_S = 2.0
_MIN_PIECE_BYTES = 1 << 20
"""A read is split over several connections only where each of them gets at least this many bytes."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A connected peer: its description, and the link to each of its ranks that holds some of this rank's KV heads."""

    peer: TransportPeer
    links: list[tuple[RankShare, TcpLink]]
    is_leaving: bool = False

    @property
    def problem(self) -> str:
        return next((link.problem for _, link in self.links if link.problem), "")

    def end(self, timeout_s: float) -> bool:
        have_ended = [link.end(timeout_s) for _, link in self.links]
        return all(have_ended)


@dataclass(frozen=True, slots=True, eq=False)
class _BlockRead:
    """Poll the pieces of one read of a peer's blocks."""

    peer: _Peer
    pieces: list[TcpPiece]

    def poll(self) -> ReadState:
        state = state_of(self.pieces)
        if state is ReadState.FAILED:
            _log.warning("a read of %s has failed: %s", self.peer.peer.worker, self.peer.problem)
        return state


@dataclass(frozen=True, slots=True, eq=False)
class _AddressTest:
    """Read the test bytes of the own source at `host`, which must be `expected`, over a link of its own into
    `received`."""

    host: str
    link: TcpLink
    received: npt.NDArray[np.uint8]
    expected: bytes
    piece: TcpPiece

    @property
    def problem(self) -> str:
        """Return why the test has failed; empty if it has not."""
        if self.piece.state is ReadState.PENDING:
            return ""
        is_wrong = self.received.tobytes() != self.expected
        return self.link.problem or ("other bytes arrived than were sent" if is_wrong else "")


class _SelfTest:
    """Poll the tests of all addresses as one read, which is DONE if one of them has succeeded."""

    def __init__(self, tests: Sequence[_AddressTest]) -> None:
        self.tests = tests

    def poll(self) -> ReadState:
        """Return the state of the self-test. Raises PeerError with what is wrong if the test of each address has
        failed."""
        if state_of([test.piece for test in self.tests]) is ReadState.PENDING:
            return ReadState.PENDING
        problems = {test.host: test.problem for test in self.tests if test.problem}
        if len(problems) == len(self.tests):
            raise PeerError(f"the transport cannot read its own memory: {'; '.join(problems.values())}")
        for host, problem in problems.items():
            _log.warning("KV is not offered at %s, only at the other addresses: %s", host, problem)
        return ReadState.DONE


class TcpTransport:
    """Read blocks of peers over TCP, and serve this rank's blocks to them, on threads of its own.

    A thread that receives a read's bytes waits in the kernel, which it leaves at once when `disconnect` ends its
    connection; so a stopped or unreachable peer cannot keep local blocks in use. `host`: address to listen on, at a
    free port; peers connect to the host of the worker's own address. `device_hosts`: addresses of several network
    devices to listen on instead; peers connect to all of them, and spread each read over them. `num_connections`:
    connections to each address of each rank of a peer. Raises TandemError(UNSUPPORTED) where it cannot listen, or for
    GPU memory where there is no CUDA driver.
    """

    def __init__(
        self,
        pool: MemoryPool,
        agent: str,
        host: str = "127.0.0.1",
        security: ConnectionSecurity | None = None,
        num_connections: int = NUM_CONNECTIONS,
        device_hosts: Sequence[str] = (),
    ) -> None:
        self.pool = pool
        self._agent = agent
        self._security = security or ConnectionSecurity()
        self._driver = None if cuda_number(pool.region.device) is None else CudaDriver()
        self._num_connections = num_connections
        if len(device_hosts) > MAX_ADDRESSES:
            message = f"the TCP transport listens at {MAX_ADDRESSES} devices at most, not at {len(device_hosts)}"
            raise TandemError(ErrorKind.UNSUPPORTED, message, param="transfer.network_devices")
        self._device_hosts = tuple(device_hosts)
        self._sources: dict[str, TcpSource] = {}
        for each in self._device_hosts or (host,):
            try:
                self._sources[each] = TcpSource(pool, each, self._security, self._driver)
            except OSError as error:
                for source in self._sources.values():
                    source.close(_CLOSE_S)
                message = f"the TCP transport cannot listen on {each}: {error}"
                param = "transfer.network_devices" if device_hosts else "worker.host"
                raise TandemError(ErrorKind.UNSUPPORTED, message, param=param) from error
        self._peers: dict[tuple[WorkerId, Incarnation], _Peer] = {}
        self._test = _SelfTest(())

    def __repr__(self) -> str:
        return f"TcpTransport({self._agent}, peers={[str(each.peer.worker) for each in self._peers.values()]})"

    def describe(self, worker: WorkerRef) -> TransportPeer:
        """Return what other workers need to read this rank's pool: the agent's name, the memory region, and how to
        connect (addresses of its network devices, or the host of the address of `worker`, which is this worker; ports;
        nonces). Any thread may call this."""
        host = host_of(worker.address)
        addresses = [_address(each if self._device_hosts else host, source) for each, source in self._sources.items()]
        metadata = msgspec.json.encode(SourceAddresses(tuple(addresses)))
        return TransportPeer(worker, self.pool.layout, (TransportRank(self._agent, metadata, self.pool.region),))

    def connect(self, peer: TransportPeer) -> None:
        check_peer(self.pool, peer)
        if peer.life in self._peers:
            raise PeerError(f"a read of {peer.worker} from before its teardown is still not proven to have ended")
        shares = shares_of(self.pool, peer)
        addresses = [decode_metadata(peer, share.rank, SourceAddresses, "TCP").all for share in shares]
        links = [(share, self._link(each)) for share, each in zip(shares, addresses, strict=True)]
        connected = _Peer(peer, links)
        for _, link in links:
            link.wait_open(_CONNECT_WAIT_S)
        if problem := connected.problem:
            connected.end(_END_WAIT_S)
            raise PeerError(f"{peer.worker} cannot be reached: {problem}")
        self._peers[peer.life] = connected

    def disconnect(self, peer: TransportPeer) -> bool:
        known = self._peers.get(peer.life)
        if known is None:
            return True
        known.is_leaving = True
        if not known.end(_END_WAIT_S):
            return False
        del self._peers[peer.life]
        return True

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> PostedRead:
        known = self._peers.get(peer.life)
        if known is None or known.is_leaving:
            raise PeerError(f"{peer.worker} is not connected")
        check_copies(self.pool, peer, copies)
        for _, link in known.links:
            link.look()
        if known.problem:
            raise PeerError(f"{peer.worker} is gone: {known.problem}")
        blocks = np.array([(copy.remote, copy.local) for copy in copies], np.int64)
        read = _BlockRead(known, [])
        for share, link in known.links:
            for piece in self._pieces(share, blocks, link.num_connections):
                read.pieces.append(piece)
                link.post(piece)
        return read

    def post_self_test(self) -> PostedRead:
        for test in self._test.tests:
            test.link.end(_END_WAIT_S)
        self._test = _SelfTest([self._test_address(host, source) for host, source in self._sources.items()])
        return self._test

    def _test_address(self, host: str, source: TcpSource) -> _AddressTest:
        # A new connection, because a source that accepts none any more must not pass.
        link = TcpLink([_address(_reachable(host), source)], 1, self._security, lambda: nullcontext(HostAccess()))
        received = np.zeros(TEST_BYTES, np.uint8)
        piece = TcpPiece(request_test(), span(received.ctypes.data, TEST_BYTES))
        link.post(piece)
        return _AddressTest(host, link, received, source.test_bytes, piece)

    def progress(self) -> None:
        """Do nothing: threads of this transport answer peers."""

    def enter_thread(self) -> None:
        """Do nothing: the threads that move bytes have CUDA contexts of their own."""

    def close(self) -> None:
        """End all connections, and wait a few seconds for their threads. Raises PeerError when a thread may still write
        to the pool."""
        links = [link for each in self._peers.values() for _, link in each.links]
        links += [test.link for test in self._test.tests]
        have_ended = [link.end(_CLOSE_S) for link in links]
        for source in self._sources.values():
            source.close(_CLOSE_S)
        for link in links:
            link.join(_CLOSE_S)
        self._peers.clear()
        if not all(have_ended):
            raise PeerError(f"a thread of {self._agent} is still running: its reads may go on")

    def _link(self, addresses: Sequence[SourceAddress]) -> TcpLink:
        return TcpLink(addresses, self._num_connections, self._security, partial(open_access, self.pool, self._driver))

    def _pieces(self, share: RankShare, blocks: npt.NDArray[np.int64], num_connections: int) -> Iterator[TcpPiece]:
        """Yield the pieces of a read from one rank over `num_connections` connections. `blocks`: remote and local block
        of each copy."""
        most = max(1, _MIN_PIECE_BYTES // share.num_bytes, -(-len(blocks) // num_connections))
        region = self.pool.region
        for start in range(0, len(blocks), most):
            remote, local = blocks[start : start + most].T
            firsts = np.flatnonzero(np.concatenate(([True], np.diff(remote) != 1)))
            ends = np.append(firsts[1:], len(remote))
            for place in range(0, len(firsts), MAX_RUNS):
                begin, end = firsts[place : place + MAX_RUNS], ends[place : place + MAX_RUNS]
                runs = np.stack((remote[begin], end - begin), axis=1)
                request = request_blocks(runs, share.remote_offset, share.num_bytes)
                ours = local[begin[0] : end[-1]]
                spans = block_spans(region.address, region.block_bytes, ours, share.local_offset, share.num_bytes)
                yield TcpPiece(request, spans)


def _address(host: str, source: TcpSource) -> SourceAddress:
    return SourceAddress(host, source.port, source.nonce.hex())


def _reachable(host: str) -> str:
    """Return an address at which this process reaches a listener on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
