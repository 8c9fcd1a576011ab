"""Test which transport reads which peer, and that the choice hides nothing of either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer
from tandem.transfer.auto_transport import AutoTransport, Offer, has_rdma, prefers_nixl, reach_of
from tandem.transfer.interface import BlockCopy, PeerError, ReadState
from tests.unit.transfer.scripted import P, ScriptedTransport, peer_named

NEAR, FAR = "here", "there"
ONE = [BlockCopy(BlockId(0), BlockId(1))]


def offer(machine: str, *, has_rdma: bool = False, backend: str = "UCX") -> Offer:
    return Offer(machine, has_rdma, b"tcp", b"nixl", backend)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_nixl"),
    [
        (offer(NEAR), offer(NEAR), True),
        (offer(NEAR), offer(FAR), False),
        (offer(NEAR, has_rdma=True), offer(FAR, has_rdma=True), True),
        (offer(NEAR, has_rdma=True), offer(FAR), False),
        (offer(NEAR, backend=""), offer(NEAR), False),
        (offer(NEAR, backend=""), offer(NEAR, backend=""), False),
        (offer(NEAR, has_rdma=True), offer(FAR, has_rdma=True, backend="LIBFABRIC"), False),
        (offer(""), offer(""), False),
    ],
)
def test_nixl_is_for_rdma_and_within_a_machine(ours: Offer, theirs: Offer, is_nixl: bool) -> None:
    assert prefers_nixl(ours, theirs) is is_nixl


def of(peer: TransportPeer, *offers: Offer) -> TransportPeer:
    (rank,) = peer.ranks
    metadata = [msgspec.msgpack.encode(offer) for offer in offers]
    return replace(peer, ranks=tuple(replace(rank, metadata=each) for each in metadata))


CLOSE, DISTANT = (of(P, offer(machine)) for machine in (NEAR, FAR))


@pytest.fixture
def tcp() -> ScriptedTransport:
    return ScriptedTransport()


@pytest.fixture
def nixl() -> ScriptedTransport:
    return ScriptedTransport(num_reads=100)


@pytest.fixture
def auto(tcp: ScriptedTransport, nixl: ScriptedTransport) -> AutoTransport:
    return AutoTransport(tcp, nixl, "UCX", machine=NEAR, has_rdma=False)


def test_a_peer_is_read_by_the_chosen_transport(
    auto: AutoTransport, tcp: ScriptedTransport, nixl: ScriptedTransport
) -> None:
    with pytest.raises(PeerError, match="not connected"):
        auto.post_read(CLOSE, ONE)
    auto.connect(CLOSE)
    read = auto.post_read(CLOSE, ONE)
    assert (len(nixl.posted), len(tcp.posted)) == (1, 0)
    assert read.poll() is ReadState.PENDING
    (theirs,) = nixl.open
    nixl.end(theirs)
    assert read.poll() is ReadState.DONE
    assert auto.disconnect(CLOSE) and auto.disconnect(CLOSE)
    with pytest.raises(PeerError, match="not connected"):
        auto.post_read(CLOSE, ONE)


def test_ranks_of_which_one_is_far_are_read_over_tcp(auto: AutoTransport, tcp: ScriptedTransport) -> None:
    both = of(P, offer(NEAR), offer(FAR))
    auto.connect(both)
    auto.post_read(both, ONE)
    assert len(tcp.posted) == 1


def test_without_nixl_all_is_tcp(tcp: ScriptedTransport) -> None:
    auto = AutoTransport(tcp, None, "", machine=NEAR, has_rdma=True)
    auto.connect(CLOSE)
    auto.post_read(CLOSE, ONE)
    assert len(tcp.posted) == 1


def test_a_next_life_on_another_machine_is_read_by_the_other_transport(
    auto: AutoTransport, tcp: ScriptedTransport, nixl: ScriptedTransport
) -> None:
    auto.connect(CLOSE)
    assert auto.disconnect(CLOSE) and nixl.disconnected == [CLOSE.life]
    moved = of(peer_named("p", 2), offer(FAR))
    auto.connect(moved)
    auto.post_read(moved, ONE)
    assert (len(nixl.posted), len(tcp.posted)) == (0, 1)
    with pytest.raises(PeerError, match="not connected"):
        auto.post_read(CLOSE, ONE)


def test_an_open_read_of_the_same_life_keeps_the_other_transport_away(
    auto: AutoTransport, nixl: ScriptedTransport
) -> None:
    auto.connect(CLOSE)
    read = auto.post_read(CLOSE, ONE)
    assert auto.disconnect(CLOSE) is False
    with pytest.raises(PeerError, match="not proven"):
        auto.connect(DISTANT)
    (theirs,) = nixl.open
    nixl.end(theirs)
    assert read.poll() is ReadState.DONE
    assert auto.disconnect(CLOSE)
    auto.connect(DISTANT)


NO_TEXT = b"\x91\xa1\xff"
DEEP = msgspec.msgpack.encode(offer(NEAR)).replace(b"\x95", b"\x96", 1) + b"\x91" * 100_000


@pytest.mark.parametrize("metadata", [b"", b"garbage", b"\x91\x01", NO_TEXT, DEEP], ids=len)
def test_a_description_of_another_transport_is_refused(auto: AutoTransport, metadata: bytes) -> None:
    (rank,) = P.ranks
    with pytest.raises(PeerError, match="to choose from"):
        auto.connect(replace(P, ranks=(replace(rank, metadata=metadata),)))


@pytest.mark.parametrize("broken", ["tcp", "nixl", None])
def test_a_self_test_needs_both(request: pytest.FixtureRequest, auto: AutoTransport, broken: str | None) -> None:
    if broken is not None:
        request.getfixturevalue(broken).test_state = ReadState.FAILED
    read = auto.post_self_test()
    assert read.poll() is (ReadState.DONE if broken is None else ReadState.FAILED)


def test_an_error_of_a_transport_proves_no_end(auto: AutoTransport, nixl: ScriptedTransport) -> None:
    auto.connect(CLOSE)
    read = auto.post_read(CLOSE, ONE)
    (theirs,) = nixl.open
    nixl.lose_track(theirs)
    with pytest.raises(PeerError, match="in doubt"):
        read.poll()
    assert not auto.disconnect(CLOSE), "its memory is in doubt until the transport says otherwise"


def test_the_description_has_what_either_transport_needs(auto: AutoTransport) -> None:
    (rank,) = auto.describe(WorkerRef(WorkerId("w"), Incarnation(1), "127.0.0.1:1")).ranks
    described = msgspec.msgpack.decode(rank.metadata, type=Offer)
    assert (described.machine, described.has_rdma, described.nixl_backend) == (NEAR, False, "UCX")


@pytest.fixture
def port(tmp_path: Path) -> Callable[[str], Path]:
    def make(state: str) -> Path:
        folder = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)
        return tmp_path

    return make


def test_rdma_needs_an_active_port_and_its_devices(port: Callable[[str], Path]) -> None:
    root = port("4: ACTIVE\n")
    assert not has_rdma({}, root), "a pod without the devices cannot use the port that it sees"
    (root / "dev/infiniband").mkdir(parents=True)
    assert has_rdma({}, root)


@pytest.mark.parametrize(
    ("environ", "is_usable"),
    [
        ({"UCX_TLS": "tcp"}, False),
        ({"UCX_TLS": "tcp,cuda_copy,cuda_ipc"}, False),
        ({"UCX_TLS": "rc_mlx5,cuda_copy"}, True),
        ({"UCX_TLS": "^ib"}, False),
        ({"UCX_TLS": "^tcp"}, True),
        ({"UCX_TLS": "^dc,ud"}, True),
        ({"UCX_TLS": "^rc"}, False),
        ({"UCX_TLS": "^all"}, False),
        ({"UCX_TLS": "all"}, True),
        ({"UCX_NET_DEVICES": "lo"}, False),
        ({"UCX_NET_DEVICES": "eth0,mlx5_0:1"}, True),
        ({"UCX_NET_DEVICES": "mlx5_1:1"}, False),
        ({"UCX_NET_DEVICES": "mlx5_0:2"}, False),
        ({"UCX_NET_DEVICES": "^mlx5_1:1,eth0"}, True),
        ({"UCX_NET_DEVICES": "^mlx5_1:1,mlx5_0:1"}, False),
        ({"UCX_NET_DEVICES": "mlx5_[0-3]:1"}, True),
        ({"UCX_NET_DEVICES": "mlx5_[1-10]:1"}, False),
        ({"UCX_NET_DEVICES": "^mlx5_[1-3]:1"}, True),
    ],
)
def test_settings_of_ucx_can_exclude_rdma(
    port: Callable[[str], Path], environ: dict[str, str], is_usable: bool
) -> None:
    root = port("4: ACTIVE\n")
    (root / "dev/infiniband").mkdir(parents=True)
    assert has_rdma(environ, root) is is_usable


def test_a_port_without_a_cable_is_no_rdma(port: Callable[[str], Path]) -> None:
    root = port("1: DOWN\n")
    (root / "dev/infiniband").mkdir(parents=True)
    assert not has_rdma({}, root)


def test_host_memory_reaches_as_far_as_process_ids_do() -> None:
    host, machine = reach_of("cpu"), reach_of("cuda:0")
    assert host.startswith(machine) and host != machine
