"""The contract of Transport, for every implementation: content, and typed ends for every way a peer can fail."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tandem.kv.layout import KVGroup, KVRegion
from tandem.transfer.interface import BlockCopy, PeerError, ReadState
from tandem.transfer.peer_layout import CopyRefused
from tests.contract.transfer.conftest import connect, copies_of, reference


def all_blocks(rig) -> list[BlockCopy]:
    return copies_of(range(len(rig.memory)), range(len(rig.memory)))


def test_any_blocks_arrive_anywhere_and_nothing_else_changes(rig, good_peer) -> None:
    connect(rig.transport, good_peer.handshake)
    rng = random.Random(0)
    for num in (1, 2, 17, len(rig.memory)):
        rig.memory[:] = 0xEE
        remote = rng.sample(range(len(rig.memory)), num)
        local = rng.sample(range(len(rig.memory)), num)
        read = rig.transport.post_read(good_peer.handshake, copies_of(remote, local))
        assert rig.settle(read) is ReadState.DONE
        assert np.array_equal(rig.memory[local], good_peer.content[remote])
        others = np.setdiff1d(np.arange(len(rig.memory)), local)
        assert (rig.memory[others] == 0xEE).all()


def test_runs_of_neighbours_arrive_whole(rig, good_peer) -> None:
    connect(rig.transport, good_peer.handshake)
    remote = [*range(10, 30), 5, 4, 3, *range(100, 120), 40, 41]
    local = [*range(20), 90, 89, 88, *range(200, 210), *range(60, 70), 254, 255]
    read = rig.transport.post_read(good_peer.handshake, copies_of(remote, local))
    assert rig.settle(read) is ReadState.DONE
    assert np.array_equal(rig.memory[local], good_peer.content[remote])


def test_many_reads_at_once(rig, good_peer) -> None:
    connect(rig.transport, good_peer.handshake)
    rng = random.Random(1)
    remote = rng.sample(range(len(rig.memory)), len(rig.memory))
    local = rng.sample(range(len(rig.memory)), len(rig.memory))
    size = 8
    reads = [
        rig.transport.post_read(good_peer.handshake, copies_of(remote[i : i + size], local[i : i + size]))
        for i in range(0, len(remote), size)
    ]
    assert len(set(reads)) == len(reads)
    rng.shuffle(reads)
    assert [rig.settle(read) for read in reads] == [ReadState.DONE] * len(reads)
    assert np.array_equal(rig.memory[local], good_peer.content[remote])


def test_two_transports_of_one_process(rig) -> None:
    producer, memory = rig.new_transport()
    memory[:] = np.random.default_rng(3).integers(0, 256, memory.shape, dtype=np.uint8)
    peer = producer.describe(reference("neighbour"))
    connect(rig.transport, peer)
    read = rig.transport.post_read(peer, copies_of([3, 1, 200], [0, 250, 4]))
    while (state := read.poll()) is ReadState.PENDING:
        producer.progress()
    assert state is ReadState.DONE
    assert np.array_equal(rig.memory[[0, 250, 4]], memory[[3, 1, 200]])
    assert rig.transport.disconnect(peer)


def test_the_self_test_moves_bytes_but_none_of_the_pool(rig) -> None:
    rig.memory[:] = 0x5A
    for _ in range(2):
        assert rig.settle(rig.transport.post_self_test()) is ReadState.DONE
    assert (rig.memory == 0x5A).all()


def test_a_read_needs_a_connection(rig, good_peer) -> None:
    assert rig.transport.disconnect(good_peer.handshake)
    with pytest.raises(PeerError, match="not connected"):
        rig.transport.post_read(good_peer.handshake, copies_of([0], [0]))
    assert rig.transport.disconnect(good_peer.handshake), "twice is once"
    connect(rig.transport, good_peer.handshake)
    connect(rig.transport, good_peer.handshake)
    assert rig.settle(rig.transport.post_read(good_peer.handshake, copies_of([9], [0]))) is ReadState.DONE
    assert np.array_equal(rig.memory[0], good_peer.content[9])


@pytest.mark.parametrize(("remote", "local"), [(256, 0), (-1, 0), (0, 256), (0, -1), (2**40, 0)])
def test_a_block_that_does_not_exist_is_refused_alone(rig, good_peer, remote: int, local: int) -> None:
    connect(rig.transport, good_peer.handshake)
    with pytest.raises(CopyRefused):
        rig.transport.post_read(good_peer.handshake, copies_of([1, remote], [1, local]))
    assert (rig.memory == 0).all()
    assert rig.settle(rig.transport.post_read(good_peer.handshake, copies_of([2], [1]))) is ReadState.DONE


def test_a_read_of_nothing_is_refused(rig, good_peer) -> None:
    connect(rig.transport, good_peer.handshake)
    with pytest.raises(CopyRefused):
        rig.transport.post_read(good_peer.handshake, [])


def misfit_regions(good: KVRegion) -> list[KVRegion]:
    return [
        replace(good, head_stop=1),
        replace(good, head_stop=1, block_bytes=good.block_bytes // 2),
        replace(good, block_bytes=good.block_bytes // 2),
        replace(good, num_blocks=0),
        replace(good, address=0),
    ]


def test_a_peer_whose_blocks_do_not_fit_is_refused(rig, good_peer) -> None:
    good = good_peer.handshake
    (rank,) = good.ranks
    other_layouts = [
        replace(good.layout, block_size=32),
        replace(good.layout, groups=(replace(good.layout.group, layers=9),)),
        replace(good.layout, groups=(replace(good.layout.group, dtype="float16"),)),
        replace(good.layout, groups=(KVGroup(8, 1, 32, "float32"),)),
    ]
    misfits = [replace(good, layout=layout) for layout in other_layouts]
    misfits += [
        replace(good, ranks=()),
        replace(good, ranks=(rank, rank)),
        *(replace(good, ranks=(replace(rank, region=region),)) for region in misfit_regions(rank.region)),
    ]
    for misfit in misfits:
        with pytest.raises(PeerError):
            connect(rig.transport, misfit)


@pytest.mark.parametrize("metadata", [b"", b"garbage", b"[1, 2]", b'["x", 1, 1, 1, "zz"]', b"\xff" * 400])
def test_metadata_that_means_nothing_is_refused(rig, good_peer, metadata: bytes) -> None:
    (rank,) = good_peer.handshake.ranks
    with pytest.raises(PeerError):
        nobody = replace(rank, metadata=metadata, agent="nobody.1")
        connect(rig.transport, replace(good_peer.handshake, ranks=(nobody,)))


def read_outcome(rig, peer, copies: Sequence[BlockCopy]) -> ReadState:
    """Connect, read, and wait for the end; a PeerError anywhere counts as FAILED."""
    try:
        connect(rig.transport, peer.handshake)
        return rig.settle(rig.transport.post_read(peer.handshake, copies))
    except PeerError:
        return ReadState.FAILED


def test_a_peer_that_died_before_the_handshake(rig) -> None:
    peer = rig.spawn("victim", 11)
    peer.kill()
    assert read_outcome(rig, peer, all_blocks(rig)) is ReadState.FAILED
    assert (rig.memory == 0).all()


def test_a_peer_that_died_before_a_read(rig) -> None:
    peer = rig.spawn("victim", 12)
    assert read_outcome(rig, peer, copies_of([0], [0])) is ReadState.DONE
    peer.kill()
    assert read_outcome(rig, peer, all_blocks(rig)) is ReadState.FAILED
    assert rig.transport.disconnect(peer.handshake), "a dead peer leaves nothing in doubt"


def test_a_peer_that_dies_during_a_read(rig) -> None:
    peer = rig.spawn("victim", 13)
    assert read_outcome(rig, peer, copies_of([0], [0])) is ReadState.DONE
    peer.signal(signal.SIGSTOP)
    read = rig.transport.post_read(peer.handshake, all_blocks(rig))
    peer.kill()
    state = rig.settle(read)
    assert state is ReadState.FAILED or np.array_equal(rig.memory, peer.content)
    assert rig.transport.disconnect(peer.handshake)


def test_a_peer_that_closed_its_transport_but_lives(rig) -> None:
    peer = rig.spawn("victim", 14)
    assert read_outcome(rig, peer, copies_of([0], [0])) is ReadState.DONE
    peer.close_transport()
    state = read_outcome(rig, peer, copies_of([1], [1]))
    if rig.kind != "nixl":
        assert state is ReadState.FAILED
    else:
        really_there = np.array_equal(rig.memory[1], peer.content[1])
        assert state is ReadState.FAILED or really_there, "NIXL reads it from shared memory: the lease's business"


def test_a_peer_that_restarted_under_the_same_name(rig) -> None:
    old = rig.spawn("victim", 15)
    assert read_outcome(rig, old, copies_of([0], [0])) is ReadState.DONE
    old.kill()
    young = rig.spawn("victim", 16)
    with pytest.raises(PeerError):
        rig.settle(rig.transport.post_read(old.handshake, copies_of([1], [1])))
    assert (rig.memory[1] == 0).all()
    assert read_outcome(rig, young, copies_of([1], [1])) is ReadState.DONE
    assert np.array_equal(rig.memory[1], young.content[1])
    assert read_outcome(rig, old, copies_of([2], [2])) is ReadState.FAILED


def test_a_stopped_peer_hangs_nobody_and_its_next_life_is_read(rig) -> None:
    old = rig.spawn("victim", 17)
    assert read_outcome(rig, old, copies_of([0], [0])) is ReadState.DONE
    old.signal(signal.SIGSTOP)
    read = rig.transport.post_read(old.handshake, copies_of(range(128), range(128)))
    state = read.poll()
    assert state is (ReadState.PENDING if rig.needs_its_target else ReadState.DONE)

    rig.transport.disconnect(old.handshake)
    young = rig.spawn("victim", 18)
    assert read_outcome(rig, young, copies_of(range(128), range(128, 256))) is ReadState.DONE
    assert np.array_equal(rig.memory[128:], young.content[:128])

    old.signal(signal.SIGCONT)
    until_disconnected(rig, old)
    if rig.kind in ("tcp", "auto"):
        assert not rig.memory[1:128].any(), "the teardown ended the read"
    else:
        assert np.array_equal(rig.memory[:128], old.content[:128]), "the late bytes came before the proof"
    rig.memory[:128] = 0x77
    assert read_outcome(rig, young, copies_of([0], [200])) is ReadState.DONE
    assert (rig.memory[:128] == 0x77).all(), "nothing came after it"


def test_a_teardown_is_unproven_while_a_stopped_peer_may_still_answer(rig) -> None:
    peer = rig.spawn("victim", 19)
    assert read_outcome(rig, peer, copies_of([0], [0])) is ReadState.DONE
    peer.signal(signal.SIGSTOP)
    rig.transport.post_read(peer.handshake, all_blocks(rig))
    assert rig.transport.disconnect(peer.handshake) is not rig.is_held_by_its_target
    if rig.is_held_by_its_target:
        with pytest.raises(PeerError, match="not connected"):
            rig.transport.post_read(peer.handshake, copies_of([0], [0]))
        with pytest.raises(PeerError, match="not proven"):
            rig.transport.connect(peer.handshake)
    peer.signal(signal.SIGCONT)
    until_disconnected(rig, peer)
    assert read_outcome(rig, peer, copies_of([5], [6])) is ReadState.DONE, "and then it may return"


def test_nothing_writes_after_close(rig) -> None:
    transport, memory = rig.new_transport()
    peer = rig.spawn("victim", 20)
    transport.connect(peer.handshake)
    assert rig.settle(transport.post_read(peer.handshake, copies_of([0], [0]))) is ReadState.DONE
    peer.signal(signal.SIGSTOP)
    transport.post_read(peer.handshake, all_blocks(rig))
    transport.close()
    memory[:] = 0x77
    peer.signal(signal.SIGCONT)
    answer = read_outcome(rig, peer, all_blocks(rig))
    assert answer is ReadState.DONE or rig.needs_its_target, "UCX may abort a peer whose TCP reader left"
    assert (memory == 0x77).all()


def until_disconnected(rig, peer) -> None:
    def attempt() -> bool:
        rig.transport.progress()
        return rig.transport.disconnect(peer.handshake)

    rig.until(attempt, bool)
