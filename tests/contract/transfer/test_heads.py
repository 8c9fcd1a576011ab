"""Reads between workers of different tensor-parallel degrees: each rank gets its heads, wherever they lie."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from tandem.engine.transfer_messages import (
    Connected,
    ConnectPeer,
    FailureKind,
    PeerDrained,
    PeerLost,
    ReadDone,
    ReadFailed,
    TransportRank,
)
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVRegion
from tandem.transfer.interface import ReadState
from tests.contract.transfer.conftest import Rig, copies_of
from tests.contract.transfer.heads import HEADS, LOCAL, REMOTE, SEED, World, layout_of
from tests.contract.transfer.peer_process import NUM_BLOCKS, known_content

SPLITS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 1)]
"""(ranks of the producer, ranks of the consumer)"""
SHARED, SMALL, NIXL, TCP = "local-float32", "local-float8_e4m3fn", "nixl-float32", "tcp-float32"
WORLDS = (SHARED, SMALL, NIXL, TCP)
OFTEN = {SHARED: SPLITS, SMALL: [(1, 2)], NIXL: [(1, 2), (2, 1), (2, 2)], TCP: [(1, 2), (2, 1), (2, 2)]}
"""What `make test` tries of each world: which heads are read is the same for all, and each rank is a process."""


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A transport of NIXL takes half a second to open, so the tests share theirs."""
    kind, dtype = str(request.param).split("-")
    with ExitStack() as stack:
        yield World(kind, layout_of(dtype), stack)


def worlds(*often: str) -> pytest.MarkDecorator:
    """All worlds, of which `make test` tries those that are named."""
    marks = {name: () if name in often else (pytest.mark.nightly,) for name in WORLDS}
    return pytest.mark.parametrize("world", [pytest.param(name, marks=marks[name]) for name in WORLDS], indirect=True)


@worlds(SHARED, SMALL, NIXL, TCP)
def test_each_rank_gets_its_heads_and_nothing_else_changes(world: World) -> None:
    for giving, taking in OFTEN[f"{world.kind}-{world.layout.group.dtype}"]:
        assert_heads(world, giving, taking)


@pytest.mark.nightly
@worlds(SMALL, NIXL, TCP)
def test_each_rank_gets_its_heads_whatever_the_degrees(world: World) -> None:
    for giving, taking in SPLITS:
        assert_heads(world, giving, taking)


def assert_heads(world: World, giving: int, taking: int) -> None:
    producer = world.producer(giving)
    expected = known_content(SEED, world.layout).reshape(NUM_BLOCKS, HEADS, -1)
    for rank in world.consumer(taking):
        rank.carrier.accept(ConnectPeer(producer))
        rank.carrier.accept(world.order(1, producer))
        connected, done = rank.until(ReadDone)
        assert connected == Connected(producer), (giving, taking)
        assert isinstance(done, ReadDone), (giving, taking)
        assert done.num_bytes == len(REMOTE) * rank.memory.shape[1], (giving, taking)
        mine = expected[REMOTE, rank.heads.start : rank.heads.stop].reshape(len(REMOTE), -1)
        assert np.array_equal(rank.memory[LOCAL], mine), (giving, taking)
        others = np.setdiff1d(np.arange(NUM_BLOCKS), LOCAL)
        assert (rank.memory[others] == 0xEE).all(), (giving, taking)


@worlds(SHARED)
@pytest.mark.parametrize("taking", [1, 2, 4])
def test_heads_of_the_wrong_rank_do_not_pass(world: World, taking: int) -> None:
    """Two ranks that say they hold each other's heads: all bytes arrive, each of them in another place."""
    producer = world.producer(2)
    first, second = producer.ranks
    ranks = (replace(first, region=crossed(first, second)), replace(second, region=crossed(second, first)))
    liar = replace(producer, ranks=ranks)
    for rank in world.consumer(taking):
        rank.carrier.accept(ConnectPeer(liar))
        rank.carrier.accept(world.order(2, liar))
        failed = rank.until(ReadFailed)[-1]
        assert isinstance(failed, ReadFailed)
        assert (failed.kind, failed.drained) == (FailureKind.DIGEST, True)


def crossed(rank: TransportRank, other: TransportRank) -> KVRegion:
    """The memory of one with the heads that the other holds."""
    return replace(rank.region, head_start=other.region.head_start, head_stop=other.region.head_stop)


@worlds(SHARED)
def test_the_digest_of_one_wrong_head_fails_the_rank_that_holds_it_and_no_other(world: World) -> None:
    producer = world.producer(2)
    good = world.order(3, producer)
    spoilt = tuple(BlockDigest(o.block, (*o.heads[:3], o.heads[3] ^ 1)) for o in good.offered)
    for rank in world.consumer(2):
        rank.carrier.accept(ConnectPeer(producer))
        rank.carrier.accept(replace(good, offered=spoilt))
        end = rank.until(ReadFailed if 3 in rank.heads else ReadDone)[-1]
        assert isinstance(end, ReadFailed if 3 in rank.heads else ReadDone)


@worlds(SHARED, NIXL)
def test_a_rank_that_died_costs_the_whole_peer_and_nobody_else(world: World) -> None:
    victim, processes = world.spawn("victim", 2)
    (rank,), healthy = world.consumer(1), world.producer(1)
    rank.carrier.accept(ConnectPeer(victim))
    rank.carrier.accept(ConnectPeer(healthy))
    rank.carrier.accept(world.order(4, victim))
    rank.until(ReadDone)
    processes[1].kill()
    processes[1].wait()
    rank.carrier.accept(world.order(5, victim))
    events = rank.until(ReadFailed, PeerLost)
    # The proof that no read of it goes on may come in the same turn.
    (failed,) = (event for event in events if isinstance(event, ReadFailed))
    (lost,) = (event for event in events if isinstance(event, PeerLost))
    assert failed.kind is FailureKind.PEER and lost.peer == victim
    if not lost.proven and not any(isinstance(event, PeerDrained) for event in events):
        rank.until(PeerDrained)
    rank.carrier.accept(ConnectPeer(healthy))
    rank.carrier.accept(world.order(6, healthy))
    assert isinstance(rank.until(ReadDone)[-1], ReadDone)


@worlds(SHARED, NIXL)
def test_a_rank_that_dies_during_a_read_leaves_no_uncertain_read(world: World) -> None:
    victim, processes = world.spawn("stopped", 2)
    (rank,) = world.consumer(1)
    everything = copies_of(range(NUM_BLOCKS), range(NUM_BLOCKS))
    rank.transport.connect(victim)
    assert Rig.settle(rank.transport.post_read(victim, everything[:1])) is ReadState.DONE
    processes[1].send_signal(signal.SIGSTOP)
    read = rank.transport.post_read(victim, everything)
    processes[1].kill()
    is_failed = Rig.settle(read) is ReadState.FAILED
    assert is_failed or np.array_equal(rank.memory, known_content(SEED, world.layout)), (
        "what shared memory gave before the end is whole"
    )
    assert rank.transport.disconnect(victim), "the read of the rank that lives is over too"
