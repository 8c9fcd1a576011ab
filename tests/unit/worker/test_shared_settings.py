"""Test which settings must be equal for all ranks of a worker."""

from __future__ import annotations

from dataclasses import replace

from tandem.core.config import Bytes, Config, TransferConfig
from tandem.worker.ranks.shared_settings import shared_settings


def test_what_one_machine_may_choose_is_not_shared() -> None:
    first = Config()
    model = replace(first.model, id="/elsewhere", cache_dir="/cache", served_name="other")
    engine = replace(first.engine, node_rank=1, master_addr="first", master_port=1, num_threads=3)
    assert shared_settings(replace(first, model=model, engine=engine)) == shared_settings(first)


def test_what_a_rank_computes_and_how_it_is_divided_is_shared() -> None:
    first = Config()
    changes = {
        "model.dtype": replace(first, model=replace(first.model, dtype="float64")),
        "engine.tensor_parallel": replace(first, engine=replace(first.engine, tensor_parallel=2)),
        "engine.nnodes": replace(first, engine=replace(first.engine, nnodes=2)),
        "engine.block_size": replace(first, engine=replace(first.engine, block_size=32)),
        "engine.host_cache_memory": replace(first, engine=replace(first.engine, host_cache_memory=Bytes(5))),
        "transfer.backend": replace(first, transfer=TransferConfig(backend="tcp")),
    }
    for key, changed in changes.items():
        ours, theirs = shared_settings(first), shared_settings(changed)
        assert [name for name in ours if ours[name] != theirs[name]] == [key]
    assert shared_settings(first)["version"]
