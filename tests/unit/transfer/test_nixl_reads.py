"""Test reads of several ranks over NIXL: a read is over only when none of its transfers is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer, TransportRank
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.transfer import nixl_transport
from tandem.transfer.interface import BlockCopy, PeerError, ReadState
from tandem.transfer.nixl_agent import NixlAgent
from tandem.transfer.nixl_transport import NixlTransport
from tests.memory_pools import memory_pool

LAYOUT = KVLayout(16, (KVGroup(1, 4, 8, "float32"),))
HEAD = LAYOUT.head_bytes
ADDRESS = 1 << 20


class CutOff(Exception):
    """The library's error when UCX has closed the connection by force."""


class UncertainError(Exception):
    """Any other error of the library."""


@dataclass(eq=False)
class Transfer:
    agent: str
    state: str | Exception = "PROC"
    num_releases: int = 0

    def release(self) -> None:
        self.num_releases += 1


@dataclass(eq=False)
class Blocks:
    """A prepared list: (address, bytes, device number, stride, number)."""

    agent: str
    strided: tuple[int, ...]

    def release(self) -> None:
        """Lists need no end here."""


class Alive:
    """A stand-in for the library's own agent."""


@dataclass
class Library:
    """The calls of a NIXL agent; transfers end when the test says so."""

    agent: Alive = field(default_factory=Alive)
    lists: list[Blocks] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    post_errors: dict[str, Exception] = field(default_factory=dict)
    posted: str = "PROC"

    def register_memory(self, regions: Any, kind: str) -> None:
        """All memory is good."""

    def get_agent_metadata(self) -> bytes:
        return b"consumer"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.loaded.append(metadata.decode())
        return metadata

    def remove_remote_agent(self, agent: str) -> None:
        self.loaded.remove(agent)

    def prep_xfer_dlist(self, agent: str, strided: np.ndarray, kind: str) -> Blocks:
        blocks = Blocks(agent, tuple(strided[0].tolist()))
        self.lists.append(blocks)
        return blocks

    def make_prepped_xfer(self, kind: str, ours: Blocks, mine: Any, theirs: Blocks, yours: Any) -> Transfer:
        assert (kind, ours.strided[1]) == ("READ", theirs.strided[1]), "both sides name as many bytes"
        return Transfer(theirs.agent)

    def transfer(self, transfer: Transfer) -> str:
        if transfer.agent in self.post_errors:
            raise self.post_errors[transfer.agent]
        self.transfers.append(transfer)
        return self.posted

    def check_xfer_state(self, transfer: Transfer) -> str:
        if isinstance(transfer.state, Exception):
            raise transfer.state
        return transfer.state

    def get_new_notifs(self) -> None:
        """None ever comes."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()

    def open_agent(name: str, backends: Sequence[str], *, uses_cuda: bool) -> NixlAgent:
        return NixlAgent(name, library, (CutOff, UncertainError), (CutOff,), backends[0])

    monkeypatch.setattr(nixl_transport, "open_agent", open_agent)
    return library


def producer(num_ranks: int) -> TransportPeer:
    share = 4 // num_ranks
    ranks = tuple(
        TransportRank(
            f"g{i}", f"UCX\0g{i}".encode(), KVRegion(ADDRESS * (i + 2), 9, share * HEAD, i * share, (i + 1) * share)
        )
        for i in range(num_ranks)
    )
    return TransportPeer(WorkerRef(WorkerId("g"), Incarnation(1), "h:1"), LAYOUT, ranks)


def consumer(head_start: int = 0, head_stop: int = 4) -> NixlTransport:
    return NixlTransport(memory_pool(ADDRESS, 7, LAYOUT, heads=range(head_start, head_stop)), "consumer.1.0")


COPIES = [BlockCopy(BlockId(1), BlockId(2)), BlockCopy(BlockId(8), BlockId(6))]


def test_lists_name_the_heads_that_both_sides_hold(library: Library) -> None:
    transport = consumer(1, 3)
    transport.connect(producer(2))
    _, first, own_low, second, own_high = library.lists
    assert (first.agent, first.strided) == ("g0", (2 * ADDRESS + HEAD, HEAD, 0, 2 * HEAD, 9))
    assert (own_low.agent, own_low.strided) == ("NIXL_INIT_AGENT", (ADDRESS, HEAD, 0, 2 * HEAD, 7))
    assert (second.agent, second.strided) == ("g1", (3 * ADDRESS, HEAD, 0, 2 * HEAD, 9))
    assert own_high.strided == (ADDRESS + HEAD, HEAD, 0, 2 * HEAD, 7)


def test_ranks_that_hold_nothing_for_us_are_not_loaded_and_equal_shares_are_whole(library: Library) -> None:
    transport = consumer(2, 3)
    peer = producer(4)
    transport.connect(peer)
    assert library.loaded == ["g2"]
    own, theirs = library.lists
    assert theirs.strided == (4 * ADDRESS, HEAD, 0, HEAD, 9)
    assert own.strided == (ADDRESS, HEAD, 0, HEAD, 7), "prepared once"
    assert transport.disconnect(peer)
    assert library.loaded == []


@pytest.mark.parametrize(("metadata", "theirs"), [(b"LIBFABRIC\0g0", "LIBFABRIC"), (b"g0", "no backend")])
def test_a_peer_with_another_backend_is_refused(library: Library, metadata: bytes, theirs: str) -> None:
    peer = producer(1)
    (rank,) = peer.ranks
    with pytest.raises(PeerError, match=f"{theirs} of NIXL, this worker UCX"):
        consumer().connect(replace(peer, ranks=(replace(rank, metadata=metadata),)))


def test_a_rank_that_cannot_be_loaded_leaves_none_behind(library: Library) -> None:
    peer = producer(2)
    liar = TransportPeer(peer.worker, LAYOUT, (peer.ranks[0], TransportRank("g1", b"UCX\0other", peer.ranks[1].region)))
    with pytest.raises(PeerError, match="its metadata says other"):
        consumer().connect(liar)
    assert library.loaded == []


def test_a_read_is_done_when_it_is_at_every_rank(library: Library) -> None:
    transport, peer = consumer(), producer(2)
    transport.connect(peer)
    read = transport.post_read(peer, COPIES)
    first, second = library.transfers
    second.state = "DONE"
    assert read.poll() is ReadState.PENDING
    assert not transport.disconnect(peer), "the other one may still write"
    first.state = "DONE"
    assert read.poll() is ReadState.DONE
    assert [each.num_releases for each in library.transfers] == [1, 1]
    assert transport.disconnect(peer)


def test_one_rank_that_is_cut_off_fails_the_read_when_the_others_have_ended(library: Library) -> None:
    transport, peer = consumer(), producer(4)
    transport.connect(peer)
    read = transport.post_read(peer, COPIES)
    library.transfers[1].state = CutOff("reset")
    assert read.poll() is ReadState.PENDING
    for each in (0, 2, 3):
        library.transfers[each].state = "DONE"
    assert read.poll() is ReadState.FAILED
    assert transport.disconnect(peer)


def test_a_post_that_fails_at_the_second_rank_leaves_the_first_uncertain(library: Library) -> None:
    transport, peer = consumer(), producer(2)
    transport.connect(peer)
    library.post_errors["g1"] = CutOff("reset")
    with pytest.raises(PeerError, match="is gone"):
        transport.post_read(peer, COPIES)
    assert not transport.disconnect(peer)
    with pytest.raises(PeerError, match="not proven"):
        transport.connect(peer)
    library.transfers[0].state = "DONE"
    assert transport.disconnect(peer)
    assert library.loaded == []


def test_an_uncertain_end_at_one_rank_is_no_end(library: Library) -> None:
    transport, peer = consumer(), producer(2)
    transport.connect(peer)
    read = transport.post_read(peer, COPIES)
    library.transfers[0].state = UncertainError("?")
    with pytest.raises(PeerError, match="unknown"):
        read.poll()
    library.transfers[1].state = "DONE"
    assert not transport.disconnect(peer)


def test_a_post_error_of_the_library_leaves_its_peer_uncertain(library: Library) -> None:
    """Transfers of the failed post may still be running."""
    transport, peer = consumer(), producer(1)
    transport.connect(peer)
    library.posted = "ERR"
    with pytest.raises(PeerError, match="cannot be read"):
        transport.post_read(peer, COPIES)
    assert not transport.disconnect(peer)
