"""The leader's side of its ranks: what they are told, how they start, and every way in which one is lost. The ranks are
threads here that speak as the program does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.ports import TransportPeer, TransportRank
from tandem.engine.rank_messages import (
    ClearBlocks,
    Forward,
    Loaded,
    Logits,
    MoverBytes,
    OpenMover,
    RankCommand,
    RankEvent,
    RankFailed,
    RankReady,
    RankRegistered,
    RanksLost,
)
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.wire.rank_codec import decode_command, encode_event
from tandem.worker.ranks.rank_channel import RankChannel, connect, private_directory
from tandem.worker.ranks.rank_group import RankGroup

PATIENCE_S = 20.0
WORKER = WorkerRef(WorkerId("w"), Incarnation(7), "127.0.0.1:1")
LAYOUT = KVLayout(16, (KVGroup(3, 2, 32, "float32"),))


class Rank:
    """One that runs until its line ends. `how`: what it says of its end, if it has ended."""

    def __init__(self, how: str | None = None) -> None:
        self.how = how
        self.stops = 0
        self.heard: list[RankCommand | MoverBytes] = []
        self.line: RankChannel | None = None
        self.is_gone = threading.Event()

    def ended(self) -> str | None:
        return self.how

    def stop(self, timeout_s: float) -> None:
        self.stops += 1

    def follow(self, directory: Path, rank: int, *says: RankEvent | bytes, listens: bool = True) -> None:
        self.line = connect(directory, 5.0)

        def run() -> None:
            assert self.line is not None
            with suppress(OSError):  # its leader may have given up by then
                for event in (RankReady(rank), *says):
                    self.line.send(event if isinstance(event, bytes) else encode_event(event))
            while listens and (message := self.line.receive()) is not None:
                self.heard.append(decode_command(message))
            if listens:
                self.line.close()
            self.is_gone.set()

        threading.Thread(target=run, daemon=True).start()


class Rig:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ranks: list[Rank] = []
        self.says: tuple[RankEvent | bytes, ...] = (Loaded(7),)
        self.listens = True

    def launch(self, directory: Path, rank: int) -> Rank:
        assert directory == self.directory and rank == len(self.ranks) + 1
        self.ranks.append(Rank())
        self.ranks[-1].follow(directory, rank, *self.says, listens=self.listens)
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


def test_all_hear_everything_in_order(rig: Rig) -> None:
    rank_group = rig.rank_group(3)
    rank_group.wait_loaded()
    commands = [ClearBlocks((BlockId(3),)), Forward(4, 2, 1, 0, 3), Logits(2)] * 50
    for command in commands:
        rank_group.send_command(command)
    until(lambda: all(len(rank.heard) == len(commands) for rank in rig.ranks))
    assert all(rank.heard == commands for rank in rig.ranks) and rank_group.num_blocks == [7, 7]
    lost: list[str] = []
    rank_group.watch(lost.append)
    rank_group.close()
    rank_group.close()
    assert all(rank.is_gone.wait(PATIENCE_S) for rank in rig.ranks)
    assert [rank.stops for rank in rig.ranks] == [1, 1] and lost == []


def test_a_rank_s_transfer_agent_is_told_and_heard_alone(rig: Rig) -> None:
    rank_group, heard = rig.rank_group(3), list[tuple[int, bytes]]()
    rank_group.on_transfer_data(lambda rank, data: heard.append((rank, data)))
    rank_group.wait_loaded()
    rank_group.send_to_transfer(2, b"read")
    until(lambda: rig.ranks[1].heard)
    assert rig.ranks[1].heard == [MoverBytes(b"read")] and rig.ranks[0].heard == []
    line = rig.ranks[1].line
    assert line is not None
    line.send(encode_event(MoverBytes(b"done")))
    until(lambda: heard)
    assert heard == [(2, b"done")]
    rank_group.close()


def test_how_each_rank_is_read_is_told_in_order(rig: Rig) -> None:
    rank_group = rig.rank_group(3)
    rank_group.wait_loaded()
    peers = [
        TransportPeer(WORKER, LAYOUT, (TransportRank(f"w.7.{rank}", b"", KVRegion(4096, 1, LAYOUT.block_bytes, 0, 2)),))
        for rank in rank_group.ranks
    ]
    for rank, peer in reversed([*zip(rig.ranks, peers, strict=True)]):
        assert rank.line is not None
        rank.line.send(encode_event(RankRegistered(peer)))
    assert rank_group.open_transfers(WORKER) == peers
    until(lambda: all(rank.heard for rank in rig.ranks))
    assert [rank.heard for rank in rig.ranks] == [[OpenMover(WORKER)]] * 2
    rank_group.close()


def test_one_that_cannot_open_its_transport_says_why(rig: Rig) -> None:
    rig.says = (Loaded(7), RankFailed(ErrorKind.UNSUPPORTED, "there is no NIXL"))
    rank_group = rig.rank_group(2)
    with pytest.raises(TandemError, match="rank 1: there is no NIXL") as caught:
        rank_group.open_transfers(WORKER)
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    rank_group.close()


def test_one_that_does_not_start_is_said_and_the_others_are_ended(rig: Rig) -> None:
    dead = Rank("its process ended with 3")

    def launch(directory: Path, rank: int) -> Rank:
        if rank == 1:
            return rig.launch(directory, rank)
        return dead

    with pytest.raises(TandemError, match="rank 2 did not start: its process ended with 3"):
        RankGroup(rig.directory, 3, launch, 5.0)
    assert rig.ranks[0].is_gone.wait(PATIENCE_S) and (rig.ranks[0].stops, dead.stops) == (1, 1)


def test_two_of_one_name_are_refused(rig: Rig) -> None:
    def launch(directory: Path, rank: int) -> Rank:
        stranger = Rank()
        stranger.follow(directory, 1)
        return stranger

    with pytest.raises(TandemError, match=r"first message is RankReady\(rank=1\)"):
        RankGroup(rig.directory, 3, launch, 5.0)


def test_one_that_fails_while_it_loads_says_why(rig: Rig) -> None:
    rig.says = (RankFailed(ErrorKind.UNSUPPORTED, "the weights lack a.weight"),)
    rank_group = rig.rank_group(2)
    with pytest.raises(TandemError, match=r"rank 1: the weights lack a\.weight") as caught:
        rank_group.wait_loaded()
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    rank_group.close()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda line: line.close(), "rank 1 is gone"),
        (lambda line: line.send(b"\xff"), "rank 1 sent an invalid message"),
        (lambda line: line.send(b""), "rank 1 sent an invalid message"),
        (lambda line: line.send(encode_event(RankReady(1))), "rank 1 sent an invalid message"),
        (lambda line: line.send(encode_event(RankFailed(ErrorKind.INTERNAL, "out of memory"))), "rank 1: out of mem"),
    ],
    ids=["gone", "garbage", "nothing", "out of turn", "failed"],
)
def test_one_that_is_lost_is_told_once_to_each_who_watches(
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


def test_one_that_takes_nothing_is_waited_for_no_longer_than_said(rig: Rig) -> None:
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


def test_a_transfer_agent_that_takes_nothing_is_lost(rig: Rig) -> None:
    """What it was told last may be half told: whoever waits for its answer would wait for ever."""
    rig.listens = False
    rank_group, lost = rig.rank_group(2, timeout_s=0.1), list[str]()
    rank_group.wait_loaded()
    rank_group.watch(lost.append)
    for _ in range(10_000):
        rank_group.send_to_transfer(1, bytes(1000))
        if lost:
            break
    assert len(lost) == 1 and "cannot send to rank 1" in lost[0]
    rank_group.close()
    assert rig.ranks[0].line is not None
    rig.ranks[0].line.close()
