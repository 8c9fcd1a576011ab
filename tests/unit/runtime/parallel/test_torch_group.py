"""Test process groups whose ranks find each other through shared stores, and how a waiting rank is released."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from tandem.runtime.parallel.communicator import CollectiveFailed
from tandem.runtime.parallel.shard import Shard
from tandem.runtime.parallel.torch_group import TorchGroup, interface_of
from tests.golden.parallel import linked_stores

TIMEOUT_S = 30.0
CPU = torch.device("cpu")


def test_what_one_rank_sets_all_can_read() -> None:
    first, second = linked_stores(2)
    first.set("a", "text")
    second.set("b", b"\xff\0")
    for store in (first, second):
        store.wait(["a", "b"])
        assert (store.get("a"), store.get("b")) == (b"text", b"\xff\0")
        assert store.check(["a", "b"]) and not store.check(["c"])


def test_a_read_waits_for_the_entry_of_another_rank() -> None:
    first, second = linked_stores(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.get, "late")
        first.set("late", b"x")
        assert waiting.result(TIMEOUT_S) == b"x"


def test_the_wait_for_an_entry_is_bounded() -> None:
    (store,) = linked_stores(1)
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(milliseconds=20))
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(RuntimeError):
        store.get("never")


def joined(size: int, timeout_s: float = TIMEOUT_S) -> list[TorchGroup]:
    stores = linked_stores(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: TorchGroup(stores[rank], Shard(rank, size), CPU, timeout_s), range(size)))


def test_ranks_join_and_sum() -> None:
    groups = joined(3)
    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(lambda group: group.all_reduce(torch.full((2,), group.rank + 1.0)), groups))
        least = list(pool.map(lambda group: group.least(10 - group.rank), groups))
    assert all(torch.equal(total, torch.full((2,), 6.0)) for total in sums) and least == [8, 8, 8]


def test_the_wait_for_a_rank_that_is_missing_is_bounded() -> None:
    store = linked_stores(2)[0]
    with pytest.raises(CollectiveFailed):
        TorchGroup(store, Shard(0, 2), CPU, 0.2)


def test_a_rank_that_waits_for_another_is_released_by_abort() -> None:
    """The other rank's connections stay open and silent, as those of a host that is gone."""
    first, _second = joined(2, timeout_s=600.0)
    began, failures = threading.Event(), list[CollectiveFailed]()

    def wait() -> None:
        began.set()
        try:
            first.least(1)
        except CollectiveFailed as failure:
            failures.append(failure)

    waiting = threading.Thread(target=wait)
    waiting.start()
    began.wait()
    first.abort()
    waiting.join(TIMEOUT_S)
    assert len(failures) == 1


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo" == interface_of("localhost")
    assert interface_of("192.0.2.1") is None and interface_of("no.such.host.invalid") is None
