"""Test who may connect to the first rank over TCP, and that strangers hold up nobody."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.core.config import ClusterConfig, Config, EngineConfig, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.rank_messages import RankReady
from tandem.transfer import connection_server
from tandem.wire.rank_codec import RANK_EVENTS
from tandem.worker.ranks import rank_listener
from tandem.worker.ranks.local_rank import RemoteRank
from tandem.worker.ranks.rank_channel import MAX_BYTES, RankChannel
from tandem.worker.ranks.rank_group import RankGroup
from tandem.worker.ranks.rank_listener import RankListener, connect, listen_on_network
from tests.certificates import Authority
from tests.ports import free_port

PATIENCE_S = 20.0
NEVER = threading.Event()


class Leader:
    """Listens for ranks, and sends back what they send."""

    def __init__(self, config: Config) -> None:
        self.num_served = 0
        self.listener: RankListener = listen_on_network(config, self._serve)

    def _serve(self, connection: socket.socket) -> None:
        self.num_served += 1
        channel = RankChannel(connection, 5.0)
        while (message := channel.receive()) is not None:
            channel.send(message)

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.listener.address.rpartition(":")
        return host, int(port)


def config_of(cluster: ClusterConfig, host: str = "127.0.0.1") -> Config:
    return Config(engine=replace(EngineConfig(), master_port=0), worker=WorkerConfig(host=host), cluster=cluster)


@pytest.fixture
def member(secret: Path) -> Config:
    return config_of(ClusterConfig(secret_file=str(secret)))


@pytest.fixture
def leader(member: Config) -> Iterator[Leader]:
    leader = Leader(member)
    yield leader
    leader.listener.close()


def echoes(leader: Leader, config: Config) -> None:
    channel = RankChannel(connect(leader.listener.address, config, NEVER), 5.0)
    channel.send(b"message")
    assert channel.receive() == b"message"
    channel.close()


def test_a_member_is_served_also_after_no_further_one_is_accepted(leader: Leader, member: Config) -> None:
    channel = RankChannel(connect(leader.listener.address, member, NEVER), 5.0)
    channel.send(b"1")
    assert channel.receive() == b"1"
    leader.listener.stop_accepting()
    channel.send(b"2")
    assert channel.receive() == b"2"
    with pytest.raises(OSError):
        socket.create_connection(leader.place, 1.0)
    leader.listener.close()
    assert channel.receive() is None
    channel.close()


def test_a_rank_without_the_secret_is_refused(leader: Leader, member: Config, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("w" * 64)
    for cluster in (ClusterConfig(secret_file=str(wrong)), ClusterConfig()):
        with pytest.raises(TandemError, match=r"compare cluster\.secret_file") as caught:
            connect(leader.listener.address, replace(member, cluster=cluster), NEVER)
        assert caught.value.kind is ErrorKind.UNAUTHENTICATED
    assert leader.num_served == 0
    echoes(leader, member)


def test_a_leader_without_the_secret_is_refused(member: Config) -> None:
    leader = Leader(config_of(ClusterConfig()))
    with pytest.raises(TandemError, match="do not authenticate each other") as caught:
        connect(leader.listener.address, member, NEVER)
    assert caught.value.kind is ErrorKind.UNAUTHENTICATED and leader.num_served == 0
    leader.listener.close()


def test_certificates_of_another_cluster_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_listener, "HANDSHAKE_S", 0.5)  # for which one without TLS waits for the other to begin
    ours, strangers = Authority(tmp_path / "ours"), Authority(tmp_path / "strangers")
    member = config_of(ours.issue("member"))
    leader = Leader(member)
    for cluster in (strangers.issue("stranger"), ClusterConfig()):
        with pytest.raises(TandemError, match="do not authenticate each other"):
            connect(leader.listener.address, config_of(cluster), NEVER)
    assert leader.num_served == 0
    echoes(leader, member)
    leader.listener.close()


def test_messages_cross_in_both_directions_over_tls(tmp_path: Path) -> None:
    """Both sides send more than the sockets hold before either reads all."""
    member = config_of(Authority(tmp_path / "ca").issue("member"))
    leader = Leader(member)
    channel = RankChannel(connect(leader.listener.address, member, NEVER), PATIENCE_S)
    messages = [bytes([number]) * (1 << 20) for number in range(20)]

    def send() -> None:
        for message in messages:
            channel.send(message)

    sender = threading.Thread(target=send)
    sender.start()
    assert [channel.receive() for _ in messages] == messages
    sender.join()
    channel.close()
    assert channel.receive() is None
    leader.listener.close()


def test_a_send_to_a_rank_that_does_not_read_is_bounded_over_tls(tmp_path: Path) -> None:
    member = config_of(Authority(tmp_path / "ca").issue("member"))
    served = threading.Event()

    def hold(_connection: socket.socket) -> None:
        served.wait(PATIENCE_S)

    listener = listen_on_network(member, hold)
    channel = RankChannel(connect(listener.address, member, NEVER), 0.1)
    with pytest.raises(OSError, match="does not read"):
        for _ in range(100):
            channel.send(bytes(1 << 20))
    served.set()
    channel.close()
    listener.close()


def test_strangers_get_nothing_and_harm_nobody(leader: Leader, member: Config) -> None:
    order = random.Random(3)
    for content in (b"", b"GET / HTTP/1.1\r\n\r\n", order.randbytes(48), order.randbytes(1 << 20)):
        with socket.create_connection(leader.place, PATIENCE_S) as stranger, suppress(OSError):
            assert len(stranger.recv(1 << 16)) == 24, "the greeting of the handshake, with a random number"
            stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1 << 16) == b""
    assert leader.num_served == 0
    echoes(leader, member)


def test_a_connection_that_proves_nothing_ends(leader: Leader, member: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_server, "HANDSHAKE_S", 0.1)
    with socket.create_connection(leader.place, PATIENCE_S) as silent:
        assert len(silent.recv(24)) == 24
        assert silent.recv(1) == b""
    echoes(leader, member)


def test_connections_that_prove_nothing_make_room_for_ranks(
    leader: Leader, member: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_server, "HANDSHAKE_S", 600.0)
    monkeypatch.setattr(connection_server, "MAX_UNPROVEN", 4)
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(leader.place, PATIENCE_S)) for _ in range(4)]
        for each in idle:
            assert len(each.recv(24)) == 24
        echoes(leader, member)
        assert idle[0].recv(1) == b"", "the rank took its place"


def test_an_oversized_message_costs_the_rank(member: Config) -> None:
    made: list[socket.socket] = []

    def launch(address: str, rank: int) -> RemoteRank:
        made.append(connect(address, member, NEVER))
        RankChannel(made[0], 5.0).send(RANK_EVENTS.encode(RankReady(1)))
        return RemoteRank()

    group = RankGroup(
        lambda serve: listen_on_network(member, serve), 2, launch, 5.0, on_entry=lambda key, value: None, settings={}
    )
    made[0].sendall(struct.pack(">I", MAX_BYTES + 1))
    reason = group.reason(PATIENCE_S)
    assert reason is not None and "rank 1 sent an invalid message" in reason.message
    group.close()
    made[0].close()


def test_a_rank_waits_for_its_leader(member: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_listener, "RETRY_S", 0.01)
    port = free_port()
    made: list[Leader] = []
    at_port = replace(member, engine=replace(member.engine, master_port=port))
    timer = threading.Timer(0.2, lambda: made.append(Leader(at_port)))
    timer.start()
    channel = RankChannel(connect(f"127.0.0.1:{port}", member, NEVER), 5.0)
    channel.send(b"late")
    assert channel.receive() == b"late"
    timer.join()
    channel.close()
    made[0].listener.close()


def test_the_wait_for_a_leader_is_bounded(member: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_listener, "RETRY_S", 0.01)
    monkeypatch.setattr(rank_listener, "MEET_S", 0.05)
    with pytest.raises(TandemError, match="the first rank cannot be reached at") as caught:
        connect(f"127.0.0.1:{free_port()}", member, NEVER)
    assert caught.value.kind is ErrorKind.WORKER_LOST and caught.value.param == "engine.master_addr"


def test_the_end_of_the_parent_ends_the_wait(member: Config) -> None:
    ended = threading.Event()
    ended.set()
    with pytest.raises(TandemError, match="cannot be reached"):
        connect(f"127.0.0.1:{free_port()}", member, ended)


def test_a_port_in_use_is_named(member: Config) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TandemError, match=f"cannot listen for ranks on 127.0.0.1:{port}") as caught:
            Leader(replace(member, engine=replace(member.engine, master_port=port)))
    assert caught.value.param == "engine.master_port"


def test_a_leader_that_others_reach_needs_a_secret() -> None:
    with pytest.raises(TandemError, match="--secret-file"):
        Leader(config_of(ClusterConfig(), "0.0.0.0"))


def test_a_socket_that_is_gone() -> None:
    with pytest.raises(TandemError, match="cannot be reached at /nowhere"):
        connect("/nowhere/leader.sock", Config(), NEVER)
