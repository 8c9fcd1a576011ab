"""Test that matrices in float8 are restored as their format defines them, and what of a format is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.core.errors import TandemError
from tandem.runtime.architectures.quantization_config import read_stored_format
from tandem.runtime.checkpoint import SINGLE_FILE, Checkpoint
from tests.stored_formats import COMPRESSED, FP8, quantise, restored

_NAME = "model.layers.0.mlp.down_proj.weight"


def _checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, folder / SINGLE_FILE)
    return Checkpoint(folder, torch.float32, stored=read_stored_format(config))


def _tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    weight = torch.randn(70, 100, generator=torch.Generator().manual_seed(1))
    numbers, scale = quantise(weight, config)
    suffix = "_scale_inv" if config is FP8 else "_scale"
    return {_NAME: numbers, _NAME + suffix: scale}


@pytest.mark.parametrize("config", [FP8, COMPRESSED], ids=["fp8", "compressed-tensors"])
def test_values_are_restored_from_their_bits(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = _tensors(config)
    numbers, scale = tensors.values()
    with _checkpoint(tmp_path, config, tensors) as checkpoint:
        got = checkpoint.take(_NAME, (70, 100))
        checkpoint.finish()
    assert torch.equal(got, restored(numbers, scale, config))
    with _checkpoint(tmp_path, config, tensors) as checkpoint:
        assert torch.equal(checkpoint.take(_NAME, (70, 100), range(10, 30), range(5, 90)), got[10:30, 5:90])


def test_one_scale_of_a_whole_matrix_and_a_matrix_without_scales(tmp_path: Path) -> None:
    numbers, _ = quantise(torch.ones(4, 8), COMPRESSED)
    tensors = {_NAME: numbers, f"{_NAME}_scale": torch.tensor(0.25), "model.norm.weight": torch.ones(8)}
    with _checkpoint(tmp_path, COMPRESSED, tensors) as checkpoint:
        assert torch.equal(checkpoint.take(_NAME, (4, 8)), torch.full((4, 8), 112.0))
        assert torch.equal(checkpoint.take("model.norm.weight", (8,)), torch.ones(8))


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "checkpoint_format": "gptq"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
_ROWS, _COLUMNS, _GROUP = 24, 48, 16
_BASE = "model.layers.0.mlp.up_proj"
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
Words = list[list[int]]


def _nibble(words: Words, row: int, column: int) -> int:
    """Return number `column` of a row of words of eight numbers of four bits, the lowest bits first."""
    return words[row][column // 8] >> 4 * (column % 8) & 15


def _random_words(source: random.Random, rows: int, words: int) -> Words:
    return [[source.randrange(1 << 32) for _ in range(words)] for _ in range(rows)]


def _int32(words: Words) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def _gptq(source: random.Random, offset: int) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    groups = [source.randrange(_COLUMNS // _GROUP) for _ in range(_COLUMNS)]
    zeros = _random_words(source, _COLUMNS // _GROUP, _ROWS // 8)
    by_output = _random_words(source, _ROWS, _COLUMNS // 8)
    scales = [[source.uniform(0.1, 1) for _ in range(_ROWS)] for _ in range(_COLUMNS // _GROUP)]
    parts = {
        "qweight": _int32(by_output).T.contiguous(),
        "qzeros": _int32(zeros),
        "scales": torch.tensor(scales),
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    values = [
        [
            (_nibble(by_output, o, i) - _nibble(zeros, groups[i], o) - offset) * scales[groups[i]][o]
            for i in range(_COLUMNS)
        ]
        for o in range(_ROWS)
    ]
    return parts, values


def _awq(source: random.Random) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    # Numbers 0 to 7 of a word are at these places, counted in fours of bits from the lowest.
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    words = _random_words(source, _COLUMNS, _ROWS // 8)
    zeros = _random_words(source, _COLUMNS // _GROUP, _ROWS // 8)
    scales = [[source.uniform(0.1, 1) for _ in range(_ROWS)] for _ in range(_COLUMNS // _GROUP)]

    def number(rows: Words, row: int, column: int) -> int:
        return rows[row][column // 8] >> 4 * places[column % 8] & 15

    values = [
        [(number(words, i, o) - number(zeros, i // _GROUP, o)) * scales[i // _GROUP][o] for i in range(_COLUMNS)]
        for o in range(_ROWS)
    ]
    return {"qweight": _int32(words), "qzeros": _int32(zeros), "scales": torch.tensor(scales)}, values


def _packed_int4(source: random.Random) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    words = _random_words(source, _ROWS, _COLUMNS // 8)
    scales = [[source.uniform(0.1, 1) for _ in range(_COLUMNS // _GROUP)] for _ in range(_ROWS)]
    values = [[(_nibble(words, r, c) - 8) * scales[r][c // _GROUP] for c in range(_COLUMNS)] for r in range(_ROWS)]
    shape = torch.tensor([_ROWS, _COLUMNS])
    return {"weight_packed": _int32(words), "weight_scale": torch.tensor(scales), "weight_shape": shape}, values


def _int8(source: random.Random) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    numbers = [[source.randrange(-127, 128) for _ in range(_COLUMNS)] for _ in range(_ROWS)]
    scales = [source.uniform(0.1, 1) for _ in range(_ROWS)]
    values = [[number * scales[r] for number in row] for r, row in enumerate(numbers)]
    return {"weight": torch.tensor(numbers, dtype=torch.int8), "weight_scale": torch.tensor(scales)[:, None]}, values


def _nvfp4(source: random.Random) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    numbers = [[source.randrange(256) for _ in range(_COLUMNS // 2)] for _ in range(_ROWS)]
    scales = torch.rand(_ROWS, _COLUMNS // 16, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    parts = {
        "weight_packed": torch.tensor(numbers, dtype=torch.uint8),
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([3.0]),
        "input_global_scale": torch.tensor([1.0]),
    }

    def value(row: int, column: int) -> float:
        code = numbers[row][column // 2] >> 4 * (column % 2) & 15
        return (-1 if code >> 3 else 1) * _E2M1[code & 7] * float(scales[row, column // 16]) / 3.0

    return parts, [[value(r, c) for c in range(_COLUMNS)] for r in range(_ROWS)]


_INT4 = _compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=_GROUP)


@pytest.mark.parametrize(
    ("config", "write"),
    [
        (_GPTQ, partial(_gptq, offset=1)),
        (_GPTQ | {"checkpoint_format": "gptq_v2"}, partial(_gptq, offset=0)),
        (_AWQ, _awq),
        (_INT4, _packed_int4),
        (_compressed("int-quantized", type="int", num_bits=8, strategy="channel"), _int8),
        (_compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16), _nvfp4),
    ],
    ids=["gptq", "gptq-v2", "awq", "int4", "int8", "nvfp4"],
)
def test_numbers_of_few_bits_are_restored(
    tmp_path: Path,
    config: dict[str, Any],
    write: Callable[[random.Random], tuple[dict[str, torch.Tensor], list[list[float]]]],
) -> None:
    parts, values = write(random.Random(3))
    named = {f"{_BASE}.{part}": tensor for part, tensor in parts.items()}
    with _checkpoint(tmp_path, config, named) as checkpoint:
        got = checkpoint.take(f"{_BASE}.weight", (_ROWS, _COLUMNS))
        checkpoint.finish()
    torch.testing.assert_close(got, torch.tensor(values), rtol=1e-6, atol=0)
    first, second = list(named)[:2]
    shorter = named | {first: named[first][:-1].clone()}
    with _checkpoint(tmp_path, config, shorter) as checkpoint, pytest.raises(TandemError, match="up_proj"):
        checkpoint.take(f"{_BASE}.weight", (_ROWS, _COLUMNS))
    if "weight" not in parts:
        del named[second]
        with _checkpoint(tmp_path, config, named) as checkpoint, pytest.raises(TandemError, match="have no tensor"):
            checkpoint.take(f"{_BASE}.weight", (_ROWS, _COLUMNS))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({f"{_NAME}_scale_inv": torch.ones(3, 2)}, r"fp8 matrix .*down_proj: .*shape \[3, 2\]"),
        ({f"{_NAME}_scale_inv": torch.full((3, 3), float("nan"))}, r"down_proj: scales that are not finite"),
        ({_NAME: torch.zeros(70, 100)}, r"down_proj: torch\.float32"),
        ({_NAME: torch.zeros(70, 99).to(torch.float8_e4m3fn)}, r"shape \[70, 99\]"),
    ],
)
def test_broken_tensors_are_named(tmp_path: Path, change: dict[str, torch.Tensor], named: str) -> None:
    with (
        _checkpoint(tmp_path, FP8, _tensors(FP8) | change) as checkpoint,
        pytest.raises(TandemError, match=named),
    ):
        checkpoint.take(_NAME, (70, 100))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        (_GPTQ | {"bits": 8}, "bits=8"),
        (_GPTQ | {"dynamic": {"a": 1}}, "dynamic"),
        (_AWQ | {"version": "marlin"}, "marlin"),
        (_AWQ | {"group_size": None}, "group_size=None"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
        (COMPRESSED | {"transform_config": {"R1": {}}}, "transform_config"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (COMPRESSED | {"format": "marlin-24"}, "marlin-24"),
        (
            _compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=8, actorder="group"),
            "actorder",
        ),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (COMPRESSED | {"config_groups": {}}, "config_groups"),
        (_compressed("float-quantized", type="float", num_bits=4, strategy="channel"), "num_bits=4"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(TandemError, match=named):
        read_stored_format(config)
