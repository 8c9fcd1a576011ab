"""Write weights in few bits, and read such numbers bit by bit, as their format defines them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Stored = tuple[dict[str, torch.Tensor], list[list[float]]]
Words = list[list[int]]
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
_GROUP = 16

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 48],
}
FP8_MATRIX = {**FP8, "activation_scheme": "static", "weight_block_size": None}
"""One scale for each matrix, and one for its activations."""
_LARGEST = 448.0


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


_compressed_fp8 = partial(compressed, "float-quantized", type="float", num_bits=8)
COMPRESSED = _compressed_fp8(strategy="channel") | {"ignore": ["lm_head"]}
COMPRESSED_BLOCKS = _compressed_fp8(strategy="block", block_structure=[32, 48]) | {"ignore": ["lm_head"]}


def _block(config: dict[str, Any], shape: torch.Size) -> Sequence[int]:
    """Return how many rows and columns of a matrix share a scale."""
    if config["quant_method"] == "fp8":
        return config["weight_block_size"] or shape
    return config["config_groups"]["group_0"]["weights"].get("block_structure") or (1, shape[1])


def quantise(weight: torch.Tensor, config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 numbers of a matrix, and its scales."""
    rows, columns = _block(config, weight.shape)
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    blocks = padded.view(len(padded) // rows, rows, padded.shape[1] // columns, columns)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-6) / _LARGEST
    numbers = (blocks / scale[:, None, :, None]).view(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return numbers.to(torch.float8_e4m3fn).contiguous(), scale


def restored(numbers: torch.Tensor, scale: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Return the float32 values of a matrix, number by number from the bits."""
    rows, columns = _block(config, numbers.shape)
    bits = numbers.view(torch.uint8).tolist()
    return torch.tensor(
        [[_value(b) * float(scale[i // rows, j // columns]) for j, b in enumerate(row)] for i, row in enumerate(bits)]
    )


def _value(bits: int) -> float:
    """Return the number of an e4m3 byte: a sign, four bits of exponent with a bias of 7, three of fraction."""
    sign, exponent, fraction = -1.0 if bits >> 7 else 1.0, bits >> 3 & 15, bits & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": True, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm", "zero_point": True}


def _nibble(words: Words, row: int, column: int) -> int:
    """Return number `column` of a row of words of eight numbers of four bits, the lowest bits first."""
    return words[row][column // 8] >> 4 * (column % 8) & 15


def _random_words(source: random.Random, rows: int, words: int) -> Words:
    return [[source.randrange(1 << 32) for _ in range(words)] for _ in range(rows)]


def _int32(words: Words) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def _halves(source: random.Random, rows: int, columns: int) -> list[list[float]]:
    """Return random scales that are exact in half precision."""
    return [[source.randrange(5, 20) / 1024 for _ in range(columns)] for _ in range(rows)]


def _gptq(source: random.Random, rows: int, columns: int, offset: int, is_shuffled: bool = False) -> Stored:
    groups = [column // _GROUP for column in range(columns)]
    if is_shuffled:
        source.shuffle(groups)
    zeros = _random_words(source, columns // _GROUP, rows // 8)
    by_output = _random_words(source, rows, columns // 8)
    scales = _halves(source, columns // _GROUP, rows)
    parts = {
        "qweight": _int32(by_output).T.contiguous(),
        "qzeros": _int32(zeros),
        "scales": torch.tensor(scales, dtype=torch.float16),
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    values = [
        [
            (_nibble(by_output, o, i) - _nibble(zeros, groups[i], o) - offset) * scales[groups[i]][o]
            for i in range(columns)
        ]
        for o in range(rows)
    ]
    return parts, values


def _awq(source: random.Random, rows: int, columns: int) -> Stored:
    # Numbers 0 to 7 of a word are at these places, counted in fours of bits from the lowest.
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    words = _random_words(source, columns, rows // 8)
    zeros = _random_words(source, columns // _GROUP, rows // 8)
    scales = _halves(source, columns // _GROUP, rows)

    def number(rows: Words, row: int, column: int) -> int:
        return rows[row][column // 8] >> 4 * places[column % 8] & 15

    values = [
        [(number(words, i, o) - number(zeros, i // _GROUP, o)) * scales[i // _GROUP][o] for i in range(columns)]
        for o in range(rows)
    ]
    return {
        "qweight": _int32(words),
        "qzeros": _int32(zeros),
        "scales": torch.tensor(scales, dtype=torch.float16),
    }, values


def _packed_int4(source: random.Random, rows: int, columns: int) -> Stored:
    words = _random_words(source, rows, columns // 8)
    scales = [[source.uniform(0.005, 0.02) for _ in range(columns // _GROUP)] for _ in range(rows)]
    values = [[(_nibble(words, r, c) - 8) * scales[r][c // _GROUP] for c in range(columns)] for r in range(rows)]
    shape = torch.tensor([rows, columns])
    return {"weight_packed": _int32(words), "weight_scale": torch.tensor(scales), "weight_shape": shape}, values


def _int8(source: random.Random, rows: int, columns: int) -> Stored:
    numbers = [[source.randrange(-127, 128) for _ in range(columns)] for _ in range(rows)]
    scales = [source.uniform(0.0005, 0.002) for _ in range(rows)]
    values = [[number * scales[r] for number in row] for r, row in enumerate(numbers)]
    return {"weight": torch.tensor(numbers, dtype=torch.int8), "weight_scale": torch.tensor(scales)[:, None]}, values


def _e2m1(numbers: Words, row: int, column: int) -> float:
    """Return number `column` of a row of bytes of two numbers of four bits, the lower one first."""
    code = numbers[row][column // 2] >> 4 * (column % 2) & 15
    return (-1 if code >> 3 else 1) * _E2M1[code & 7]


def _nvfp4(source: random.Random, rows: int, columns: int, *, is_modelopt: bool = False) -> Stored:
    numbers = [[source.randrange(256) for _ in range(columns // 2)] for _ in range(rows)]
    scales = torch.rand(rows, columns // 16, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    parts = {
        "weight_packed": torch.tensor(numbers, dtype=torch.uint8),
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([30.0]),
        "input_global_scale": torch.tensor([1.0]),
    }
    if is_modelopt:
        parts = {
            "weight": parts["weight_packed"],
            "weight_scale": scales,
            "weight_scale_2": torch.tensor(1 / 30.0),
        }

    def value(row: int, column: int) -> float:
        return _e2m1(numbers, row, column) * float(scales[row, column // 16]) / 30.0

    return parts, [[value(r, c) for c in range(columns)] for r in range(rows)]


def _mxfp4(source: random.Random, rows: int, columns: int) -> Stored:
    numbers = [[source.randrange(256) for _ in range(columns // 2)] for _ in range(rows)]
    exponents = [[source.randrange(118, 122) for _ in range(-(-columns // 32))] for _ in range(rows)]
    parts = {
        "weight_packed": torch.tensor(numbers, dtype=torch.uint8),
        "weight_scale": torch.tensor(exponents, dtype=torch.uint8),
    }

    def value(row: int, column: int) -> float:
        return _e2m1(numbers, row, column) * 2.0 ** (exponents[row][column // 32] - 127)

    return parts, [[value(r, c) for c in range(columns)] for r in range(rows)]


_SHUFFLED = partial(_gptq, offset=1, is_shuffled=True)
_INT8 = compressed("int-quantized", type="int", num_bits=8, strategy="channel")
_INT4 = compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=_GROUP)
_NVFP4 = compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16)
_MXFP4 = compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32)
WRITERS: dict[str, tuple[dict[str, Any], Callable[[random.Random, int, int], Stored]]] = {
    "gptq": (GPTQ, partial(_gptq, offset=1)),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(_gptq, offset=0)),
    "gptq-desc_act": (GPTQ, _SHUFFLED),
    "awq": (AWQ, _awq),
    "int4": (_INT4, _packed_int4),
    "int8": (_INT8, _int8),
    "nvfp4": (_NVFP4, _nvfp4),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, partial(_nvfp4, is_modelopt=True)),
    "mxfp4": (_MXFP4, _mxfp4),
}
"""By format, its `quantization_config`, and a function that draws a matrix: its tensors by name, and its values."""
