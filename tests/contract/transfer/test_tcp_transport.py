"""Test what only the TCP transport has: its requests, who may connect, and what strangers and dead readers leave."""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tandem.core.clock import SystemClock
from tandem.core.config import ClusterConfig
from tandem.core.errors import TandemError
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer
from tandem.kv.layout import KVGroup, KVLayout
from tandem.transfer import connection_server, tcp_reader, tcp_source
from tandem.transfer.interface import BlockCopy, PeerError, ReadState
from tandem.transfer.pool_access import HostAccess
from tandem.transfer.socket_memory import receive_bytes, shut
from tandem.transfer.tcp_handshake import ConnectionSecurity, HandshakeRefused, greet_source
from tandem.transfer.tcp_source import TcpSource, request_blocks, request_test
from tandem.transfer.tcp_transport import TcpTransport
from tandem.worker.connection_security import connection_security
from tests.certificates import Authority
from tests.contract.transfer.conftest import GUARD_S, Peer, Rig, connect, copies_of, reference, spawn_peer
from tests.contract.transfer.peer_process import Bytes
from tests.memory_pools import memory_pool

LAYOUT = KVLayout(4, (KVGroup(1, 2, 8, "float32"),))
NUM_BLOCKS = 6000
ME = reference("source")
Open = Callable[..., tuple[TcpTransport, Bytes]]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open transports, whose pools have random content, and close them after the test."""
    transports: list[TcpTransport] = []

    def begin(name: str = "source", **options: object) -> tuple[TcpTransport, Bytes]:
        memory = np.random.default_rng(len(transports)).integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), np.uint8)
        pool = memory_pool(memory.ctypes.data, NUM_BLOCKS, LAYOUT, keepalive=memory)
        transports.append(TcpTransport(pool, name, **options))  # type: ignore[arg-type]
        return transports[-1], memory

    yield begin
    for transport in transports:
        transport.close()
    Rig.until(kv_threads, lambda names: not names)


def kv_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tandem-kv")]


def only(transport: TcpTransport) -> TcpSource:
    (source,) = transport._sources.values()
    return source


def addresses_of(*addresses: tuple[str, int, str]) -> bytes:
    """Return the metadata of a rank that serves its blocks at these addresses."""
    return json.dumps((addresses,)).encode()


def outcome(reader: TcpTransport, source: TransportPeer, copies: list[BlockCopy]) -> ReadState | str:
    """Read, and return how the read ended: its state, or the text of the error that no connection could be made."""
    try:
        connect(reader, source)
        read = reader.post_read(source, copies)
    except PeerError as error:
        return str(error)
    return Rig.settle(read)


ONE = copies_of([7], [8])


def test_a_read_of_more_pieces_than_one_request_and_one_call_hold(opened: Open) -> None:
    source, theirs = opened()
    reader, ours = opened("reader")
    order = random.Random(0)
    remote, local = (order.sample(range(NUM_BLOCKS), NUM_BLOCKS - 100) for _ in range(2))
    before = ours.copy()
    assert outcome(reader, source.describe(ME), copies_of(remote, local)) is ReadState.DONE
    assert np.array_equal(ours[local], theirs[remote])
    others = np.setdiff1d(np.arange(NUM_BLOCKS), local)
    assert np.array_equal(ours[others], before[others])


def test_transports_without_a_secret_need_the_nonce(opened: Open) -> None:
    source, _ = opened()
    other, _ = opened("other")
    reader, ours = opened("reader")
    before = ours.copy()
    (rank,) = source.describe(ME).ranks
    metadata = addresses_of(("127.0.0.1", only(source).port, only(other).nonce.hex()))
    forged = TransportPeer(ME, LAYOUT, (replace(rank, metadata=metadata),))
    assert outcome(reader, forged, ONE) is not ReadState.DONE
    assert np.array_equal(ours, before)
    assert outcome(reader, source.describe(ME), ONE) is ReadState.DONE


def secured(path: Path, *secrets: str) -> ConnectionSecurity:
    path.write_text("\n".join(secrets))
    return connection_security(ClusterConfig(secret_file=str(path)), SystemClock())


def test_readers_need_the_secret_of_the_cluster(opened: Open, tmp_path: Path) -> None:
    old, new = "o" * 64, "n" * 64
    source, theirs = opened(security=secured(tmp_path / "both", old, new))
    expected = {(old,): True, (new, old): True, ("x" * 64,): False, (): False}
    for number, (secrets, is_accepted) in enumerate(expected.items()):
        security = secured(tmp_path / str(number), *secrets) if secrets else None
        reader, ours = opened(f"reader{number}", security=security)
        before = ours.copy()
        state = outcome(reader, source.describe(ME), ONE)
        assert (state is ReadState.DONE) is is_accepted, state
        assert np.array_equal(ours[8], theirs[7] if is_accepted else before[8])
        assert reader.disconnect(source.describe(ME))


def test_a_source_must_know_the_secret_too(opened: Open, tmp_path: Path) -> None:
    source, _ = opened()
    reader, ours = opened("reader", security=secured(tmp_path / "secret", "s" * 64))
    before = ours.copy()
    assert outcome(reader, source.describe(ME), ONE) is not ReadState.DONE
    assert np.array_equal(ours, before)


def test_connections_are_encrypted_where_the_cluster_has_certificates(opened: Open, tmp_path: Path) -> None:
    ours, strangers = Authority(tmp_path / "ours"), Authority(tmp_path / "strangers")
    issued = {
        "source": ours.issue("source"),
        "member": ours.issue("member"),
        "stranger": strangers.issue("stranger"),
        "another name": ours.issue("other", "another-name"),
    }
    security = {name: connection_security(config, SystemClock()) for name, config in issued.items()}
    source, content = opened(security=security["source"])
    everything = copies_of(range(NUM_BLOCKS), range(NUM_BLOCKS))
    for name in ("member", "another name"):
        reader, memory = opened(name, security=security[name])
        assert outcome(reader, source.describe(ME), everything) is ReadState.DONE
        assert np.array_equal(memory, content)
    for name, refused in (("stranger", security["stranger"]), ("plain", None)):
        reader, memory = opened(name, security=refused)
        assert outcome(reader, source.describe(ME), ONE) is not ReadState.DONE, name
    liar, _ = opened("liar", security=security["another name"])
    reader, _ = opened("careful", security=security["member"])
    assert outcome(reader, liar.describe(ME), ONE) is not ReadState.DONE, "a source needs the name of the cluster"


@pytest.mark.parametrize("is_reflected", [False, True], ids=["wrong", "reflected"])
def test_a_source_that_accepts_everybody_is_refused(is_reflected: bool) -> None:
    ours, theirs = socket.socketpair()

    def pretend() -> None:
        theirs.sendall(b"TANDEM/1" + bytes(16))
        proof = bytes(receive_bytes(theirs, 48))[16:]
        theirs.sendall(proof if is_reflected else bytes(32))

    with ours, theirs:
        liar = threading.Thread(target=pretend)
        liar.start()
        with pytest.raises(HandshakeRefused, match="the source does not prove"):
            greet_source(ours, b"n" * 32, (b"s" * 64,))
        liar.join()


def connected(source: TcpTransport) -> socket.socket:
    """Return a connection that has proven itself, without a transport."""
    connection = socket.create_connection(("127.0.0.1", only(source).port), 10.0)
    greet_source(connection, only(source).nonce, ())
    return connection


def runs(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int64)


HEAD = struct.Struct("<BxxxIII")
SIZE = LAYOUT.block_bytes


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD.pack(9, 0, 0, 0),
        HEAD.pack(1, 0, 0, SIZE),
        HEAD.pack(1, tcp_source.MAX_RUNS + 1, 0, SIZE),
        HEAD.pack(2, 1, 0, SIZE),
        request_blocks(runs((NUM_BLOCKS, 1)), 0, SIZE),
        request_blocks(runs((0, NUM_BLOCKS + 1)), 0, SIZE),
        request_blocks(runs((3, 0)), 0, SIZE),
        request_blocks(runs((2**32 - 1, 2**32 - 1)), 0, SIZE),
        request_blocks(runs((0, 4000), (0, 4000)), 0, SIZE),
        request_blocks(runs((0, 1)), 0, 0),
        request_blocks(runs((0, 1)), 1, SIZE),
        request_blocks(runs((0, 1)), 2**32 - 1, 2**32 - 1),
    ],
)
def test_a_request_for_what_does_not_exist_ends_its_connection_alone(opened: Open, request_bytes: bytes) -> None:
    source, _ = opened()
    with connected(source) as good, connected(source) as bad:
        bad.sendall(request_bytes)
        assert bad.recv(1) == b""
        good.sendall(request_test())
        assert receive_bytes(good, tcp_source.TEST_BYTES) == only(source).test_bytes


def test_strangers_get_nothing_and_harm_nobody(opened: Open) -> None:
    source, _ = opened()
    reader, _ = opened("reader")
    order = random.Random(5)
    for content in (b"", b"GET / HTTP/1.1\r\n\r\n", order.randbytes(48), order.randbytes(1 << 20)):
        with socket.create_connection(("127.0.0.1", only(source).port), 10.0) as stranger:
            greeting = stranger.recv(1 << 16)
            assert len(greeting) == 24
            try:
                stranger.sendall(content)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1 << 16) == b""
            except OSError:
                pass
    assert outcome(reader, source.describe(ME), ONE) is ReadState.DONE


def test_another_program_at_the_address_is_no_source() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HTTP/1.1 400 Bad Request")
        with pytest.raises(HandshakeRefused, match="another program"):
            greet_source(ours, b"n" * 32, ())


def test_connections_that_prove_nothing_make_room_for_others(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_server, "HANDSHAKE_S", 600.0)
    monkeypatch.setattr(connection_server, "MAX_UNPROVEN", 8)
    source, _ = opened()
    reader, _ = opened("reader")
    idle = [socket.create_connection(("127.0.0.1", only(source).port), 10.0) for _ in range(8)]
    with ExitStack() as stack:
        for each in idle:
            stack.enter_context(each)
            assert len(each.recv(24)) == 24
        assert outcome(reader, source.describe(ME), ONE) is ReadState.DONE
        assert idle[0].recv(1) == b"", "a connection of the reader took its place"
        idle[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            idle[-1].recv(1)


def test_a_thread_that_cannot_start_costs_one_connection(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = opened()
    reader, _ = opened("reader")
    start, refused = threading.Thread.start, "tandem-kv-send"

    def refuse(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert outcome(reader, source.describe(ME), ONE) is not ReadState.DONE
    assert reader.disconnect(source.describe(ME))
    refused = "tandem-kv-receive"
    assert "can't start" in str(outcome(reader, source.describe(ME), ONE))
    refused = ""
    assert outcome(reader, source.describe(ME), ONE) is ReadState.DONE


def test_a_reader_that_reads_nothing_holds_up_nobody(opened: Open) -> None:
    source, _ = opened()
    reader, _ = opened("reader")
    with connected(source) as stuck:
        for _ in range(50):
            stuck.sendall(request_blocks(runs((0, NUM_BLOCKS)), 0, SIZE))
        assert outcome(reader, source.describe(ME), ONE) is ReadState.DONE


def test_a_peer_that_does_not_answer_fails_in_the_background(opened: Open) -> None:
    """A full queue of connections stands for a host that is gone: what is posted meanwhile is given up at once."""
    reader, _ = opened("reader")
    source, _ = opened()
    (rank,) = source.describe(ME).ranks
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        metadata = addresses_of((*full.getsockname(), only(source).nonce.hex()))
        far = TransportPeer(ME, LAYOUT, (replace(rank, metadata=metadata),))
        reader.connect(far)
        read = reader.post_read(far, ONE)
        assert read.poll() is ReadState.PENDING
        assert reader.disconnect(far)


def test_a_self_test_notices_that_no_connection_is_accepted(opened: Open) -> None:
    source, _ = opened()
    assert Rig.settle(source.post_self_test()) is ReadState.DONE
    shut(only(source)._server._listener)
    with pytest.raises(PeerError, match="cannot read its own memory"):
        Rig.settle(source.post_self_test())


@pytest.mark.parametrize(
    ("host", "address"),
    [*product(("0.0.0.0", "::"), ("127.0.0.1", "[::1]")), ("::1", "[::1]"), ("localhost", "localhost")],
)
def test_a_source_is_reached_at_its_address_of_either_family(opened: Open, host: str, address: str) -> None:
    source, _ = opened(host=host)
    reader, _ = opened("reader")
    peer = source.describe(WorkerRef(WorkerId("source"), Incarnation(1), f"{address}:1"))
    assert outcome(reader, peer, ONE) is ReadState.DONE
    assert Rig.settle(source.post_self_test()) is ReadState.DONE


READER = """
import base64, pickle, sys
import numpy as np
from tandem.core.ids import BlockId
from tandem.transfer.interface import BlockCopy, ReadState
from tandem.transfer.tcp_transport import TcpTransport
from tests.memory_pools import memory_pool

peer = pickle.loads(base64.b64decode(sys.stdin.readline()))
memory = np.zeros((peer.ranks[0].region.num_blocks, peer.layout.block_bytes), np.uint8)
pool = memory_pool(memory.ctypes.data, len(memory), peer.layout)
transport = TcpTransport(pool, "reader")
transport.connect(peer)
copies = [BlockCopy(BlockId(block), BlockId(block)) for block in range(len(memory))]
while True:
    reads = [transport.post_read(peer, copies) for _ in range(4)]
    print("reading", flush=True)
    for read in reads:
        while read.poll() is ReadState.PENDING:
            pass
"""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("num_kills", [3, pytest.param(200, marks=pytest.mark.nightly)])
def test_readers_that_are_killed_in_a_read_leave_nothing(num_kills: int, is_stopped: bool) -> None:
    """UCX over TCP aborts the source then, more often if the source is stopped (transfer_thread.DRAIN_TURNS)."""
    source = spawn_peer("tcp", "source", 1, 3, 64)
    pid = source.process.pid
    before = threads_and_files(pid)
    path = os.pathsep.join(path for path in sys.path if path)
    handshake = base64.b64encode(pickle.dumps(source.handshake)).decode() + "\n"
    try:
        for _ in range(num_kills):
            with subprocess.Popen(
                [sys.executable, "-c", READER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            ) as reader:
                assert reader.stdin is not None and reader.stdout is not None
                reader.stdin.write(handshake)
                reader.stdin.flush()
                assert reader.stdout.readline() == "reading\n"
                if is_stopped:
                    source.signal(signal.SIGSTOP)
                reader.kill()
                reader.wait()
                source.signal(signal.SIGCONT)
            assert source.process.poll() is None
        Rig.until(lambda: threads_and_files(pid), lambda now: now == before)
        check(source)
    finally:
        source.kill()


def threads_and_files(pid: int) -> tuple[int, int]:
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


def check(source: Peer) -> None:
    """Read everything once more, and compare."""
    layout = source.handshake.layout
    memory = np.zeros((len(source.content), layout.block_bytes), np.uint8)
    reader = TcpTransport(memory_pool(memory.ctypes.data, len(memory), layout), "last")
    blocks = range(len(memory))
    assert outcome(reader, source.handshake, copies_of(blocks, blocks)) is ReadState.DONE
    assert np.array_equal(memory, source.content)
    reader.close()


DEVICES = ("127.0.0.1", "127.0.0.2")
MANY = copies_of(range(NUM_BLOCKS), range(NUM_BLOCKS))
"""More than the least number of bytes that a read must have to be split."""


def test_a_read_is_spread_over_all_network_devices(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[str] = Counter()
    send = HostAccess.send

    def record(access: HostAccess, connection: socket.socket, spans: np.ndarray) -> None:
        sent[connection.getsockname()[0]] += int(spans[:, 1].sum())
        send(access, connection, spans)

    monkeypatch.setattr(HostAccess, "send", record)
    source, theirs = opened(device_hosts=DEVICES)
    reader, ours = opened("reader", num_connections=1)
    peer = source.describe(ME)
    connect(reader, peer)
    ((_, link),) = reader._peers[peer.life].links
    Rig.until(lambda: [each.is_open for each in link._connections], all)
    assert Rig.settle(reader.post_read(peer, MANY)) is ReadState.DONE
    assert np.array_equal(ours, theirs)
    assert set(sent) == set(DEVICES) and sum(sent.values()) == ours.nbytes


def greet_as_http(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"HTTP/1.1 400 Bad Request")


@contextmanager
def unreachable(how: str) -> Iterator[tuple[str, int]]:
    """Yield an address where no source answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        if how == "closed":
            listener.close()
            yield ("127.0.0.1", 1)
            return
        if how == "stranger":
            stack.enter_context(ThreadPoolExecutor(1)).submit(greet_as_http, listener)
        yield listener.getsockname()


class HeldConnections:
    """Hold back every connection of a reader with this `security` to an address of DEVICES until `decide` is called."""

    def __init__(self) -> None:
        self.security = ConnectionSecurity(connect=self._connect)
        self._decided = {host: threading.Event() for host in DEVICES}
        self._may_open: dict[str, bool] = {}

    def decide(self, host: str, *, may_open: bool) -> None:
        self._may_open[host] = may_open
        self._decided[host].set()

    def _connect(self, connection: socket.socket) -> socket.socket:
        host = connection.getpeername()[0]
        assert self._decided[host].wait(GUARD_S)
        if not self._may_open[host]:
            raise ConnectionRefusedError("refused by the test")
        return connection


@pytest.mark.parametrize("num_connections", [1, 2])
def test_pieces_for_a_device_that_never_opens_go_to_the_other_one(opened: Open, num_connections: int) -> None:
    held = HeldConnections()
    source, theirs = opened(device_hosts=DEVICES)
    reader, ours = opened("reader", num_connections=num_connections, security=held.security)
    peer = source.describe(ME)
    connect(reader, peer)
    read = reader.post_read(peer, MANY)
    held.decide(DEVICES[0], may_open=False)
    assert read.poll() is ReadState.PENDING
    held.decide(DEVICES[1], may_open=True)
    assert Rig.settle(read) is ReadState.DONE
    assert np.array_equal(ours, theirs)


def test_pieces_that_wait_for_a_connection_fail_when_the_peer_is_disconnected(opened: Open) -> None:
    held = HeldConnections()
    source, _ = opened(device_hosts=DEVICES)
    reader, ours = opened("reader", security=held.security)
    peer, before = source.describe(ME), ours.copy()
    connect(reader, peer)
    read = reader.post_read(peer, MANY)
    assert reader.disconnect(peer)
    for host in DEVICES:
        held.decide(host, may_open=True)
    assert Rig.settle(read) is ReadState.FAILED
    assert np.array_equal(ours, before)


@pytest.mark.parametrize("how", ["closed", "silent", "stranger"])
def test_a_device_that_cannot_be_reached_is_left_out(opened: Open, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(tcp_reader, "CONNECT_S", 0.3)
    source, theirs = opened()
    reader, ours = opened("reader", num_connections=1)
    (rank,) = source.describe(ME).ranks
    with unreachable(how) as bad:
        nonce = only(source).nonce.hex()
        metadata = addresses_of((*bad, nonce), ("127.0.0.1", only(source).port, nonce))
        peer = TransportPeer(ME, LAYOUT, (replace(rank, metadata=metadata),))
        for _ in range(2):
            assert outcome(reader, peer, MANY) is ReadState.DONE
            assert np.array_equal(ours, theirs)
            ours[:] = 0
            assert reader.disconnect(peer)


def test_a_source_none_of_whose_devices_is_reached_is_gone(opened: Open) -> None:
    source, _ = opened(device_hosts=DEVICES)
    reader, _ = opened("reader")
    peer = source.describe(ME)
    for each in source._sources.values():
        each.close(1.0)
    assert "cannot be reached" in str(outcome(reader, peer, ONE))


def test_reads_go_on_over_the_other_device_when_one_is_lost(opened: Open) -> None:
    source, theirs = opened(device_hosts=DEVICES)
    reader, ours = opened("reader")
    peer = source.describe(ME)
    assert outcome(reader, peer, MANY) is ReadState.DONE
    ((_, link),) = reader._peers[peer.life].links
    Rig.until(lambda: [each.is_open for each in link._connections], all)
    source._sources[DEVICES[1]].close(1.0)
    with pytest.raises(PeerError, match="is gone"):
        Rig.until(lambda: Rig.settle(reader.post_read(peer, ONE)), lambda state: False)
    assert reader.disconnect(peer)
    ours[:] = 0
    assert outcome(reader, peer, MANY) is ReadState.DONE
    assert np.array_equal(ours, theirs)


def test_a_self_test_passes_while_one_device_works(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    source, _ = opened(device_hosts=DEVICES)
    assert Rig.settle(source.post_self_test()) is ReadState.DONE
    assert not caplog.records
    shut(source._sources[DEVICES[1]]._server._listener)
    assert Rig.settle(source.post_self_test()) is ReadState.DONE
    assert f"not offered at {DEVICES[1]}" in caplog.text
    shut(source._sources[DEVICES[0]]._server._listener)
    with pytest.raises(PeerError, match="cannot read its own memory"):
        Rig.settle(source.post_self_test())


def test_an_address_of_another_machine_is_refused(opened: Open) -> None:
    with pytest.raises(TandemError, match=r"cannot listen on 192\.0\.2\.1") as error:
        opened(device_hosts=("127.0.0.1", "192.0.2.1"))
    assert error.value.param == "transfer.network_devices"


def test_more_devices_than_readers_accept_are_refused(opened: Open) -> None:
    hosts = [f"127.0.0.{number}" for number in range(1, tcp_reader.MAX_ADDRESSES + 2)]
    with pytest.raises(TandemError, match="16 devices at most, not at 17"):
        opened(device_hosts=hosts)
