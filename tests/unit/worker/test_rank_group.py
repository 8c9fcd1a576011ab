"""Test the leader's side of a rank group: commands, start, and every way in which a rank is lost, over a Unix socket
and over TCP. The ranks are threads that follow the protocol of the real program.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tandem.core.config import ClusterConfig, Config, EngineConfig, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.rank_messages import (
    AgentCommand,
    ClearBlocks,
    Forward,
    GroupCommand,
    Loaded,
    Logits,
    RankCommand,
    RankEvent,
    RankFailed,
    RankReady,
    RankRefused,
    RankRegistered,
    RanksLost,
    StartJoining,
    StartTransfer,
    StoreEntry,
)
from tandem.engine.transfer_messages import Cancel, Event, SelfTest, SelfTestDone, TransportPeer, TransportRank
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.wire.rank_codec import RANK_COMMANDS, RANK_EVENTS
from tandem.worker.ranks.rank_channel import RankChannel
from tandem.worker.ranks.rank_group import Launch, RankGroup
from tandem.worker.ranks.rank_listener import Listen, connect, listen_on_network, listen_on_socket
from tests.certificates import Authority

PATIENCE_S = 20.0
WORKER = WorkerRef(WorkerId("w"), Incarnation(7), "127.0.0.1:1")
LAYOUT = KVLayout(16, (KVGroup(3, 2, 32, "float32"),))
SETTINGS = {"version": "1", "engine.tensor_parallel": "3"}


class Rank:
    """Run until the leader's channel ends. `how` is the reported reason of the end, if the rank has ended."""

    line: RankChannel
    """Its end of the leader's channel, once it follows."""

    def __init__(self, how: str | None = None) -> None:
        self.how = how
        self.stops = 0
        self.received: list[RankCommand | AgentCommand] = []
        self.forming: list[GroupCommand] = []
        self.is_gone = threading.Event()

    def ended(self) -> str | None:
        return self.how

    def stop(self, timeout_s: float) -> None:
        self.stops += 1

    def follow(
        self,
        address: str,
        rank: int,
        *messages: RankEvent | bytes,
        config: Config,
        settings: dict[str, str],
        listens: bool = True,
    ) -> None:
        self.line = RankChannel(connect(address, config, threading.Event()), 5.0)

        def run() -> None:
            with suppress(OSError):  # its leader may have given up by then
                for event in (RankReady(rank, settings), *messages):
                    self.line.send(event if isinstance(event, bytes) else RANK_EVENTS.encode(event))
            while listens and (message := self.line.receive()) is not None:
                command = RANK_COMMANDS.decode(message)
                if isinstance(command, GroupCommand):
                    self.forming.append(command)
                else:
                    self.received.append(command)
            if listens:
                self.line.close()
            self.is_gone.set()

        threading.Thread(target=run, daemon=True).start()


class Rig:
    """Make rank groups that listen as `listen` does, with ranks that connect with the settings `config`; the fixture
    closes the groups."""

    def __init__(self, listen: Listen, config: Config) -> None:
        self.listen = listen
        self.config = config
        self.address = ""
        self.ranks: list[Rank] = []
        self.groups: list[RankGroup] = []
        self.messages: tuple[RankEvent | bytes, ...] = (Loaded(),)
        self.settings = dict(SETTINGS)
        self.listens = True
        self.entries: list[tuple[str, bytes]] = []

    def launch(self, address: str, rank: int) -> Rank:
        self.address = address
        assert rank == len(self.ranks) + 1
        self.ranks.append(Rank())
        self.follow(self.ranks[-1], address, rank)
        return self.ranks[-1]

    def follow(self, follower: Rank, address: str, rank: int) -> None:
        follower.follow(address, rank, *self.messages, config=self.config, settings=self.settings, listens=self.listens)

    def rank_group(
        self, size: int, timeout_s: float = 5.0, launch: Launch | None = None, start_s: float = PATIENCE_S
    ) -> RankGroup:
        group = RankGroup(
            self.listen,
            size,
            launch or self.launch,
            timeout_s,
            on_entry=lambda key, value: self.entries.append((key, value)),
            settings=SETTINGS,
            start_s=start_s,
        )
        self.groups.append(group)
        return group

    def loaded(self, size: int, timeout_s: float = 5.0) -> RankGroup:
        """Make a group whose ranks have loaded the model."""
        group = self.rank_group(size, timeout_s)
        group.wait_loaded()
        return group

    def close(self) -> None:
        for group in self.groups:
            group.close()


@pytest.fixture(params=["unix", "tcp", "tls"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    if request.param == "unix":
        with tempfile.TemporaryDirectory(prefix="tp-") as short:
            monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
            monkeypatch.setattr(tempfile, "tempdir", short)
            rig = Rig(listen_on_socket, Config())
            yield rig
            rig.close()
            assert os.listdir(short) == [], "whatever happened, the directory is gone"
        return
    cluster = Authority(tmp_path / "ca").issue("member") if request.param == "tls" else ClusterConfig()
    cluster = replace(cluster, secret_file=str(secret))
    engine = replace(EngineConfig(), master_port=0)
    config = Config(engine=engine, worker=WorkerConfig(host="127.0.0.1"), cluster=cluster)
    rig = Rig(partial(listen_on_network, config), config)
    yield rig
    rig.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_all_ranks_receive_all_commands_in_order(rig: Rig) -> None:
    rank_group = rig.loaded(3)
    commands = [ClearBlocks((BlockId(3),)), Forward(4, 2, 1, 0, 3), Logits(2)] * 50
    for command in commands:
        rank_group.send_command(command)
    until(lambda: all(len(rank.received) == len(commands) for rank in rig.ranks))
    assert all(rank.received == commands for rank in rig.ranks)
    assert all(rank.forming == [StartJoining()] for rank in rig.ranks)
    lost: list[str] = []
    rank_group.watch(lost.append)
    rank_group.close()
    rank_group.close()
    assert all(rank.is_gone.wait(PATIENCE_S) for rank in rig.ranks)
    assert [rank.stops for rank in rig.ranks] == [1, 1] and lost == []


def test_transfer_messages_go_to_and_from_a_single_rank(rig: Rig) -> None:
    rank_group, received = rig.loaded(3), list[tuple[int, Event]]()
    rank_group.on_transfer_event(lambda rank, event: received.append((rank, event)))
    rank_group.send_to_transfer(2, SelfTest())
    until(lambda: rig.ranks[1].received)
    assert rig.ranks[1].received == [SelfTest()] and rig.ranks[0].received == []
    rig.ranks[1].line.send(RANK_EVENTS.encode(SelfTestDone(None, 1.0)))
    until(lambda: received)
    assert received == [(2, SelfTestDone(None, 1.0))]


def test_the_transport_of_each_rank_is_reported_in_order(rig: Rig) -> None:
    rank_group = rig.loaded(3)
    peers = [
        TransportPeer(WORKER, LAYOUT, (TransportRank(f"w.7.{rank}", b"", KVRegion(4096, 1, LAYOUT.block_bytes, 0, 2)),))
        for rank in rank_group.ranks
    ]
    for rank, peer in reversed([*zip(rig.ranks, peers, strict=True)]):
        rank.line.send(RANK_EVENTS.encode(RankRegistered(peer)))
    assert rank_group.open_transfers(WORKER) == peers
    until(lambda: all(rank.received for rank in rig.ranks))
    assert [rank.received for rank in rig.ranks] == [[StartTransfer(WORKER)]] * 2


def test_a_rank_that_cannot_open_its_transport_reports_the_reason(rig: Rig) -> None:
    rig.messages = (Loaded(), RankFailed(ErrorKind.UNSUPPORTED, "there is no NIXL"))
    with pytest.raises(TandemError, match="rank 1: there is no NIXL") as caught:
        rig.rank_group(2).open_transfers(WORKER)
    assert caught.value.kind is ErrorKind.UNSUPPORTED


def test_the_entries_of_each_rank_reach_all_others(rig: Rig) -> None:
    rank_group = rig.rank_group(3)
    rank_group.publish("0", b"\xff\0")
    rig.ranks[1].line.send(RANK_EVENTS.encode(StoreEntry("2", b"two")))
    until(lambda: len(rig.ranks[0].forming) == 3 and rig.entries and len(rig.ranks[1].forming) == 2)
    assert rig.ranks[0].forming[1:] == [StoreEntry("0", b"\xff\0"), StoreEntry("2", b"two")]
    assert rig.ranks[1].forming[1:] == [StoreEntry("0", b"\xff\0")] and rig.entries == [("2", b"two")]


def test_a_rank_that_does_not_start_is_named_and_the_others_are_stopped(rig: Rig) -> None:
    dead = Rank("its process ended with 3")

    def launch(address: str, rank: int) -> Rank:
        return rig.launch(address, rank) if rank == 1 else dead

    with pytest.raises(TandemError, match="rank 2 did not start: its process ended with 3"):
        rig.rank_group(3, launch=launch)
    assert rig.ranks[0].is_gone.wait(PATIENCE_S) and (rig.ranks[0].stops, dead.stops) == (1, 1)


def test_ranks_that_nobody_starts_are_missed(rig: Rig) -> None:
    with pytest.raises(TandemError, match=r"ranks \[1, 2\] did not start within 0.1 s"):
        rig.rank_group(3, launch=lambda address, rank: Rank(), start_s=0.1)


def test_two_ranks_of_one_number_are_refused(rig: Rig) -> None:
    made: list[Rank] = []

    def launch(address: str, rank: int) -> Rank:
        made.append(Rank())
        rig.follow(made[-1], address, 1)
        return made[-1]

    with pytest.raises(TandemError, match="two processes claim to be rank 1") as caught:
        rig.rank_group(3, launch=launch)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert all(rank.is_gone.wait(PATIENCE_S) for rank in made)
    (refused,) = (command for rank in made for command in rank.forming)
    assert isinstance(refused, RankRefused) and "each machine needs its own engine.node_rank" in refused.message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({**SETTINGS, "version": "2"}, "version=2 instead of version=1"),
        ({"version": "1"}, "engine.tensor_parallel= instead of engine.tensor_parallel=3"),
        ({**SETTINGS, "new": "x"}, "new=x instead of new="),
    ],
)
def test_a_rank_with_other_settings_is_refused_on_both_sides(rig: Rig, settings: dict[str, str], reason: str) -> None:
    rig.settings = settings
    with pytest.raises(TandemError, match=reason) as caught:
        rig.rank_group(2)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert rig.ranks[0].is_gone.wait(PATIENCE_S)
    (refused,) = rig.ranks[0].forming
    assert isinstance(refused, RankRefused) and reason in refused.message


def test_a_rank_with_other_files_is_refused_on_both_sides(rig: Rig) -> None:
    rig.messages = (Loaded("abc"),)
    rank_group = rig.loaded(2)
    rank_group.require_weights("abc")
    with pytest.raises(TandemError, match="rank 1 has loaded another model"):
        rank_group.require_weights("def")
    until(lambda: len(rig.ranks[0].forming) == 2)
    assert isinstance(rig.ranks[0].forming[1], RankRefused)


@pytest.mark.parametrize("number", [0, -1, 2])
def test_a_rank_that_the_worker_does_not_have_is_refused(rig: Rig, number: int) -> None:
    def launch(address: str, rank: int) -> Rank:
        stranger = Rank()
        rig.follow(stranger, address, number)
        return stranger

    with pytest.raises(TandemError, match=f"rank {number} is none of this worker's 2 ranks"):
        rig.rank_group(2, launch=launch)


def test_a_rank_that_fails_while_loading_reports_the_reason(rig: Rig) -> None:
    rig.messages = (RankFailed(ErrorKind.UNSUPPORTED, "no tensor a.weight"),)
    with pytest.raises(TandemError, match=r"rank 1: no tensor a\.weight") as caught:
        rig.loaded(2)
    assert caught.value.kind is ErrorKind.UNSUPPORTED


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda line: line.close(), "rank 1 is gone"),
        (lambda line: line.send(b"\xff"), "rank 1 sent an invalid message"),
        (lambda line: line.send(b""), "rank 1 sent an invalid message"),
        (lambda line: line.send(RANK_EVENTS.encode(RankReady(1))), "rank 1 sent an invalid message"),
        (
            lambda line: line.send(RANK_EVENTS.encode(RankFailed(ErrorKind.INTERNAL, "out of memory"))),
            "rank 1: out of mem",
        ),
    ],
    ids=["gone", "garbage", "nothing", "out of turn", "failed"],
)
def test_a_lost_rank_is_reported_once_to_each_watcher(
    rig: Rig, end: Callable[[RankChannel], None], reason: str
) -> None:
    rank_group, first, late = rig.loaded(2), list[str](), list[str]()
    rank_group.watch(first.append)
    end(rig.ranks[0].line)
    until(lambda: first)
    rank_group.watch(late.append)
    assert first == late and len(first) == 1 and reason in first[0]
    with pytest.raises(RanksLost, match=reason):
        rank_group.send_command(Logits(1))


def test_the_wait_for_a_blocked_rank_is_bounded(rig: Rig) -> None:
    rig.listens = False
    rank_group = rig.loaded(2, timeout_s=0.1)
    blocks = ClearBlocks(tuple(BlockId(i) for i in range(10_000)))
    with pytest.raises(RanksLost, match="cannot send to rank 1"):
        for _ in range(10_000):
            rank_group.send_command(blocks)
    rank_group.close()
    rig.ranks[0].line.close()


def test_a_rank_that_reads_no_transfer_commands_is_lost(rig: Rig) -> None:
    """The last message may be half written, so a caller that waits for its reply would wait for ever."""
    rig.listens = False
    rank_group, lost = rig.loaded(2, timeout_s=0.1), list[str]()
    rank_group.watch(lost.append)
    rank_group._channels[1]._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    for id in range(1_000_000):
        rank_group.send_to_transfer(1, Cancel(id))
        if lost:
            break
    assert len(lost) == 1 and "cannot send to rank 1" in lost[0]
    rank_group.close()
    rig.ranks[0].line.close()
