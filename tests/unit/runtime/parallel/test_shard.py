"""Test that the shards of ranks cover a model exactly once, and that an indivisible size is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.core.config import EngineConfig, ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.architectures.spec import DenseMlp, ExpertsMlp, LayerSpec
from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.model_config import parse_model_config
from tandem.runtime.model_loader import check_parallel
from tandem.runtime.parallel.shard import Shard, require_divisible
from tandem_kernels.contract import ExpertRouting
from tests.unit.runtime.conftest import CONFIG, tensors


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("vocab_size", [1, 5, 50, 56])
def test_every_token_is_of_one_rank(size: int, vocab_size: int) -> None:
    parts = [Shard(rank, size).vocab(vocab_size) for rank in range(size)]
    assert [id for part in parts for id in part] == list(range(vocab_size))
    assert max(map(len, parts)) == len(parts[0])


def test_parts_are_equal_and_in_order() -> None:
    assert [Shard(rank, 3).part(12) for rank in range(3)] == [range(4), range(4, 8), range(8, 12)]
    with pytest.raises(ValueError, match="12 items do not divide by 5"):
        Shard(0, 5).part(12)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Shard(2, 2)


def test_numbers_that_do_not_divide_are_named() -> None:
    config = replace(parse_model_config(CONFIG), heads=12, kv_heads=6, layers=(LayerSpec(DenseMlp(9)),))
    require_divisible(config, 3)
    for size, message in ((2, "intermediate_size=9"), (12, "num_key_value_heads=6"), (4, "num_key_value_heads=6")):
        with pytest.raises(TandemError, match=f"tensor_parallel={size}.*{message}") as caught:
            require_divisible(config, size)
        assert caught.value.kind is ErrorKind.UNSUPPORTED and caught.value.param == "tensor_parallel"
    experts = ExpertsMlp(count=4, inner=8, routing=ExpertRouting(2), shared_inner=6)
    with pytest.raises(TandemError, match="width of the shared expert=6"):
        require_divisible(replace(config, heads=8, kv_heads=4, layers=(LayerSpec(experts),)), 4)
    with pytest.raises(TandemError, match="all heads of a row together"):
        require_divisible(replace(config, query_key_norm="row"), 3)


@pytest.mark.parametrize(
    ("model", "engine", "param"),
    [
        (ModelConfig(quantization="int8"), EngineConfig(), "quantization"),
        (ModelConfig(quantization="fp8"), EngineConfig(), "quantization"),
        (ModelConfig(), EngineConfig(kernels="compiled"), "kernels"),
    ],
)
def test_settings_that_ranks_do_not_support_are_refused_at_start(
    model_dir: Path, model: ModelConfig, engine: EngineConfig, param: str
) -> None:
    model, engine = replace(model, id=str(model_dir)), replace(engine, tensor_parallel=2)
    with pytest.raises(TandemError, match=r"tensor_parallel|on a GPU only") as caught:
        check_parallel(model, engine)
    assert caught.value.param == param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parts_of_a_tensor_are_its_rows_and_columns(model_dir: Path, dtype: torch.dtype) -> None:
    """Read the parts also where the file has the requested dtype already."""
    name = "model.layers.0.mlp.down_proj.weight"
    whole = tensors()[name]
    for rows, columns in ((None, range(24, 48)), (range(8, 16), None), (range(2, 3), range(5)), (range(32, 32), None)):
        with Checkpoint(model_dir, dtype) as checkpoint:
            part = checkpoint.take(name, (32, 48), rows=rows, columns=columns)
        expected = whole[rows.start : rows.stop] if rows else whole if rows is None else whole[:0]
        expected = expected if columns is None else expected[:, columns.start : columns.stop]
        assert part.is_contiguous() and part.dtype is dtype
        assert torch.equal(part, expected.to(dtype))


def test_a_part_of_a_tensor_of_another_shape_is_refused(model_dir: Path) -> None:
    with Checkpoint(model_dir, torch.float32) as checkpoint, pytest.raises(TandemError, match=r"shape \[32, 48\]"):
        checkpoint.take("model.layers.0.mlp.down_proj.weight", (32, 96), columns=range(48))
