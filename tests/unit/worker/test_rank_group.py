"""Test the leader's side of a rank group: commands, start, and every way in which a rank is lost. The ranks are
threads that follow the protocol of the real program.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.rank_messages import (
    AgentCommand,
    ClearBlocks,
    Forward,
    Loaded,
    Logits,
    RankCommand,
    RankEvent,
    RankFailed,
    RankReady,
    RankRegistered,
    RanksLost,
    StartTransfer,
)
from tandem.engine.transfer_messages import Cancel, Event, SelfTest, SelfTestDone, TransportPeer, TransportRank
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.wire.rank_codec import RANK_COMMANDS, RANK_EVENTS
from tandem.worker.ranks.rank_channel import RankChannel, connect, private_directory
from tandem.worker.ranks.rank_group import RankGroup

PATIENCE_S = 20.0
WORKER = WorkerRef(WorkerId("w"), Incarnation(7), "127.0.0.1:1")
LAYOUT = KVLayout(16, (KVGroup(3, 2, 32, "float32"),))


class Rank:
    """Run until the leader's channel ends. `how` is the reported reason of the end, if the rank has ended."""

    def __init__(self, how: str | None = None) -> None:
        self.how = how
        self.stops = 0
        self.received: list[RankCommand | AgentCommand] = []
        self.line: RankChannel | None = None
        self.is_gone = threading.Event()

    def ended(self) -> str | None:
        return self.how

    def stop(self, timeout_s: float) -> None:
        self.stops += 1

    def follow(self, directory: Path, rank: int, *messages: RankEvent | bytes, listens: bool = True) -> None:
        self.line = connect(directory, 5.0)

        def run() -> None:
            assert self.line is not None
            with suppress(OSError):  # its leader may have given up by then
                for event in (RankReady(rank), *messages):
                    self.line.send(event if isinstance(event, bytes) else RANK_EVENTS.encode(event))
            while listens and (message := self.line.receive()) is not None:
                self.received.append(RANK_COMMANDS.decode(message))
            if listens:
                self.line.close()
            self.is_gone.set()

        threading.Thread(target=run, daemon=True).start()


class Rig:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ranks: list[Rank] = []
        self.messages: tuple[RankEvent | bytes, ...] = (Loaded(7),)
        self.listens = True

    def launch(self, directory: Path, rank: int) -> Rank:
        assert directory == self.directory and rank == len(self.ranks) + 1
        self.ranks.append(Rank())
        self.ranks[-1].follow(directory, rank, *self.messages, listens=self.listens)
        return self.ranks[-1]

    def rank_group(self, size: int, timeout_s: float = 5.0) -> RankGroup:
        return RankGroup(self.directory, size, self.launch, timeout_s)


@pytest.fixture
def rig() -> Iterator[Rig]:
    directory = private_directory()
    assert directory.stat().st_mode & 0o777 == 0o700
    yield Rig(directory)
    assert not directory.exists(), "whatever happened, the directory is gone"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_all_ranks_receive_all_commands_in_order(rig: Rig) -> None:
    rank_group = rig.rank_group(3)
    rank_group.wait_loaded()
    commands = [ClearBlocks((BlockId(3),)), Forward(4, 2, 1, 0, 3), Logits(2)] * 50
    for command in commands:
        rank_group.send_command(command)
    until(lambda: all(len(rank.received) == len(commands) for rank in rig.ranks))
    assert all(rank.received == commands for rank in rig.ranks) and rank_group.num_blocks == [7, 7]
    lost: list[str] = []
    rank_group.watch(lost.append)
    rank_group.close()
    rank_group.close()
    assert all(rank.is_gone.wait(PATIENCE_S) for rank in rig.ranks)
    assert [rank.stops for rank in rig.ranks] == [1, 1] and lost == []


def test_transfer_messages_go_to_and_from_a_single_rank(rig: Rig) -> None:
    rank_group, received = rig.rank_group(3), list[tuple[int, Event]]()
    rank_group.on_transfer_event(lambda rank, event: received.append((rank, event)))
    rank_group.wait_loaded()
    rank_group.send_to_transfer(2, SelfTest())
    until(lambda: rig.ranks[1].received)
    assert rig.ranks[1].received == [SelfTest()] and rig.ranks[0].received == []
    line = rig.ranks[1].line
    assert line is not None
    line.send(RANK_EVENTS.encode(SelfTestDone(None, 1.0)))
    until(lambda: received)
    assert received == [(2, SelfTestDone(None, 1.0))]
    rank_group.close()


def test_the_transport_of_each_rank_is_reported_in_order(rig: Rig) -> None:
    rank_group = rig.rank_group(3)
    rank_group.wait_loaded()
    peers = [
        TransportPeer(WORKER, LAYOUT, (TransportRank(f"w.7.{rank}", b"", KVRegion(4096, 1, LAYOUT.block_bytes, 0, 2)),))
        for rank in rank_group.ranks
    ]
    for rank, peer in reversed([*zip(rig.ranks, peers, strict=True)]):
        assert rank.line is not None
        rank.line.send(RANK_EVENTS.encode(RankRegistered(peer)))
    assert rank_group.open_transfers(WORKER) == peers
    until(lambda: all(rank.received for rank in rig.ranks))
    assert [rank.received for rank in rig.ranks] == [[StartTransfer(WORKER)]] * 2
    rank_group.close()


def test_a_rank_that_cannot_open_its_transport_reports_the_reason(rig: Rig) -> None:
    rig.messages = (Loaded(7), RankFailed(ErrorKind.UNSUPPORTED, "there is no NIXL"))
    rank_group = rig.rank_group(2)
    with pytest.raises(TandemError, match="rank 1: there is no NIXL") as caught:
        rank_group.open_transfers(WORKER)
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    rank_group.close()


def test_a_rank_that_does_not_start_is_named_and_the_others_are_stopped(rig: Rig) -> None:
    dead = Rank("its process ended with 3")

    def launch(directory: Path, rank: int) -> Rank:
        if rank == 1:
            return rig.launch(directory, rank)
        return dead

    with pytest.raises(TandemError, match="rank 2 did not start: its process ended with 3"):
        RankGroup(rig.directory, 3, launch, 5.0)
    assert rig.ranks[0].is_gone.wait(PATIENCE_S) and (rig.ranks[0].stops, dead.stops) == (1, 1)


def test_two_ranks_of_one_number_are_refused(rig: Rig) -> None:
    def launch(directory: Path, rank: int) -> Rank:
        stranger = Rank()
        stranger.follow(directory, 1)
        return stranger

    with pytest.raises(TandemError, match=r"first message is RankReady\(rank=1\)"):
        RankGroup(rig.directory, 3, launch, 5.0)


def test_a_rank_that_fails_while_loading_reports_the_reason(rig: Rig) -> None:
    rig.messages = (RankFailed(ErrorKind.UNSUPPORTED, "no tensor a.weight"),)
    rank_group = rig.rank_group(2)
    with pytest.raises(TandemError, match=r"rank 1: no tensor a\.weight") as caught:
        rank_group.wait_loaded()
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    rank_group.close()


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
    rank_group, first, late = rig.rank_group(2), list[str](), list[str]()
    rank_group.wait_loaded()
    rank_group.watch(first.append)
    line = rig.ranks[0].line
    assert line is not None
    end(line)
    until(lambda: first)
    rank_group.watch(late.append)
    assert first == late and len(first) == 1 and reason in first[0]
    with pytest.raises(RanksLost, match=reason):
        rank_group.send_command(Logits(1))
    rank_group.close()


def test_the_wait_for_a_blocked_rank_is_bounded(rig: Rig) -> None:
    rig.listens = False
    rank_group = rig.rank_group(2, timeout_s=0.1)
    rank_group.wait_loaded()
    blocks = ClearBlocks(tuple(BlockId(i) for i in range(10_000)))
    with pytest.raises(RanksLost, match="cannot send to rank 1"):
        for _ in range(10_000):
            rank_group.send_command(blocks)
    rank_group.close()
    assert rig.ranks[0].line is not None
    rig.ranks[0].line.close()


def test_a_rank_that_reads_no_transfer_commands_is_lost(rig: Rig) -> None:
    """The last message may be half written, so a caller that waits for its reply would wait for ever."""
    rig.listens = False
    rank_group, lost = rig.rank_group(2, timeout_s=0.1), list[str]()
    rank_group.wait_loaded()
    rank_group.watch(lost.append)
    for id in range(100_000):
        rank_group.send_to_transfer(1, Cancel(id))
        if lost:
            break
    assert len(lost) == 1 and "cannot send to rank 1" in lost[0]
    rank_group.close()
    assert rig.ranks[0].line is not None
    rig.ranks[0].line.close()
