"""Test which devices a rank's transport is opened with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import numpy as np
import pytest

from tandem.core.config import Config, TransferConfig, WorkerConfig
from tandem.core.errors import TandemError
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.kv.layout import KVGroup, KVLayout
from tandem.transfer.interface import Transport
from tandem.transfer.memory_pool import MemoryPool
from tandem.worker.model import rank_transfer
from tandem.worker.model.rank_transfer import open_transport
from tests.memory_pools import memory_pool

LAYOUT = KVLayout(4, (KVGroup(1, 2, 8, "float32"),))
ME = WorkerRef(WorkerId("me"), Incarnation(1), "10.0.0.7:1")


@pytest.fixture
def pool() -> MemoryPool:
    memory = np.zeros((4, LAYOUT.block_bytes), np.uint8)
    return memory_pool(memory.ctypes.data, len(memory), LAYOUT, keepalive=memory)


def settings(backend: str, devices: str, host: str = "10.0.0.7") -> Config:
    transfer = TransferConfig(backend=backend, network_devices=devices)  # type: ignore[arg-type]
    return Config(transfer=transfer, worker=WorkerConfig(host=host))


@pytest.fixture
def over_tcp(pool: MemoryPool) -> Iterator[Transport]:
    transport = open_transport(settings("tcp", "lo"), pool, "me.1.0")
    yield transport
    transport.close()


def test_tcp_offers_kv_at_the_addresses_of_its_devices(over_tcp: Transport) -> None:
    (rank,) = over_tcp.describe(ME).ranks
    ((address,),) = json.loads(rank.metadata)
    assert address[0] == "127.0.0.1"


def test_ucx_learns_its_devices_before_nixl_opens(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(rank_transfer, "NixlTransport", lambda *_: seen.append(dict(environ)))
    open_transport(settings("nixl", "lo"), pool, "me.1.0")
    assert seen == [{"UCX_NET_DEVICES": "lo", "UCX_MAX_RMA_RAILS": "1"}]


def test_a_worker_starts_without_one_of_its_devices(pool: MemoryPool, caplog: pytest.LogCaptureFixture) -> None:
    open_transport(settings("tcp", "lo,no-such-device"), pool, "me.1.0").close()
    assert "KV moves without no-such-device" in caplog.text


@pytest.mark.parametrize("backend", ["tcp", "nixl", "auto"])
def test_a_worker_without_its_devices_does_not_start(pool: MemoryPool, backend: str) -> None:
    with pytest.raises(TandemError, match="lacks no-such-device") as error:
        open_transport(settings(backend, "no-such-device"), pool, "me.1.0")
    assert error.value.param == "transfer.network_devices"


def test_a_worker_for_its_own_machine_opens_no_port_at_a_device(pool: MemoryPool) -> None:
    with pytest.raises(TandemError, match=r"127\.0\.0\.1 are for this machine only") as error:
        open_transport(settings("tcp", "lo", host="127.0.0.1"), pool, "me.1.0")
    assert error.value.param == "transfer.network_devices"
