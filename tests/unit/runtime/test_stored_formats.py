"""Test that matrices in float8 are restored as their format defines them, and what of a format is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from safetensors.torch import save_file

from tandem.core.errors import TandemError
from tandem.runtime.architectures.quantization_config import read_stored_formats
from tandem.runtime.architectures.stored_format import GGUF_FORMATS
from tandem.runtime.checkpoint import SINGLE_FILE, Checkpoint
from tandem.runtime.matrices import to_floats
from tandem_kernels.reference.coded import CodedMatrix
from tests.stored_formats import (
    AWQ,
    COMPRESSED,
    COMPRESSED_BLOCKS,
    FP8,
    FP8_MATRIX,
    GPTQ,
    WRITERS,
    compressed,
    quantise,
    restored,
)

_NAME = "model.layers.0.mlp.down_proj.weight"
_BASE = "model.layers.0.mlp.up_proj"
_ROWS, _COLUMNS = 24, 48


def _checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, folder / SINGLE_FILE)
    return Checkpoint(folder, torch.float32, stored=read_stored_formats(config))


def _tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    weight = torch.randn(70, 100, generator=torch.Generator().manual_seed(1))
    numbers, scale = quantise(weight, config)
    suffix = "_scale_inv" if config is FP8 else "_scale"
    return {_NAME: numbers, _NAME + suffix: scale}


@pytest.mark.parametrize("config", [FP8, COMPRESSED, COMPRESSED_BLOCKS], ids=["fp8", "compressed-tensors", "blocks"])
def test_values_are_restored_from_their_bits(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = _tensors(config)
    numbers, scale = tensors.values()
    with _checkpoint(tmp_path, config, tensors) as checkpoint:
        got = checkpoint.take(_NAME, (70, 100))
        checkpoint.finish()
    assert torch.equal(got, restored(numbers, scale, config))
    with _checkpoint(tmp_path, config, tensors) as checkpoint:
        assert torch.equal(checkpoint.take(_NAME, (70, 100), range(10, 30), range(5, 90)), got[10:30, 5:90])


@pytest.mark.parametrize(
    ("config", "suffix"),
    [
        (COMPRESSED, "_scale"),
        (FP8_MATRIX, "_scale_inv"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}, "_scale"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "_scale"),
        ({"quant_method": "modelopt", "quant_algo": "fp8", "kv_cache_quant_algo": "FP8"}, "_scale"),
    ],
    ids=["compressed-tensors", "fp8", "AutoFP8", "fbgemm", "modelopt"],
)
def test_one_scale_of_a_whole_matrix_and_a_matrix_without_scales(
    tmp_path: Path, config: dict[str, Any], suffix: str
) -> None:
    numbers, _ = quantise(torch.ones(4, 8), COMPRESSED)
    tensors = {_NAME: numbers, f"{_NAME}{suffix}": torch.tensor(0.25), "model.norm.weight": torch.ones(8)}
    with _checkpoint(tmp_path, config, tensors) as checkpoint:
        assert torch.equal(checkpoint.take(_NAME, (4, 8)), torch.full((4, 8), 112.0))
        assert torch.equal(checkpoint.take("model.norm.weight", (8,)), torch.ones(8))


def test_blocks_without_a_size_are_those_of_transformers(tmp_path: Path) -> None:
    config = {"quant_method": "fp8"}
    numbers, scale = quantise(torch.randn(130, 140), FP8 | {"weight_block_size": [128, 128]})
    with _checkpoint(tmp_path, config, {_NAME: numbers, f"{_NAME}_scale_inv": scale}) as checkpoint:
        expected = restored(numbers, scale, FP8 | {"weight_block_size": [128, 128]})
        assert torch.equal(checkpoint.take(_NAME, (130, 140)), expected)


_HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "mxfp4": (),
}  # fmt: skip
"""Places of the numbers in half precision in a block of each type."""


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_blocks_of_a_gguf_file_have_the_values_that_its_library_restores(name: str) -> None:
    rows, num_blocks = 5, 3
    kind = GGMLQuantizationType[name.upper()]
    size, num_bytes = GGML_QUANT_SIZES[kind]
    source = np.random.default_rng(7)
    blocks = source.integers(0, 256, (rows, num_blocks, num_bytes), dtype=np.uint8)
    for place in _HALVES[name]:
        numbers = source.normal(0, 0.1, (rows, num_blocks, 1)).astype(np.float16)
        blocks[..., place : place + 2] = numbers.view(np.uint8)
    if name == "mxfp4":
        blocks[..., 0] = source.integers(0, 200, (rows, num_blocks))
    stored, form = blocks.reshape(rows, -1), GGUF_FORMATS[name]
    matrix = form.read({form.suffixes[0]: torch.from_numpy(stored)}, (rows, num_blocks * size))
    assert isinstance(matrix, CodedMatrix)
    assert np.array_equal(matrix.floats().numpy(), dequantize(stored, kind))


def _written(name: str, rows: int, columns: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """A configuration, the tensors of a random matrix by name, and the values that they stand for."""
    config, write = WRITERS[name]
    parts, values = write(random.Random(3), rows, columns)
    return config, {f"{_BASE}.{part}": tensor for part, tensor in parts.items()}, torch.tensor(values)


@pytest.mark.parametrize("name", WRITERS)
def test_numbers_of_few_bits_are_restored(tmp_path: Path, name: str) -> None:
    config, named, values = _written(name, _ROWS, _COLUMNS)
    with _checkpoint(tmp_path, config, named) as checkpoint:
        got = checkpoint.take(f"{_BASE}.weight", (_ROWS, _COLUMNS))
        checkpoint.drop(".input_global_scale")
        checkpoint.finish()
    torch.testing.assert_close(got, values, rtol=1e-6, atol=0)
    first, second = list(named)[:2]
    shorter = named | {first: named[first][:-1].clone()}
    with _checkpoint(tmp_path, config, shorter) as checkpoint, pytest.raises(TandemError, match="up_proj"):
        checkpoint.take(f"{_BASE}.weight", (_ROWS, _COLUMNS))
    if f"{_BASE}.weight" not in named:
        del named[second]
        with _checkpoint(tmp_path, config, named) as checkpoint, pytest.raises(TandemError, match="have no tensor"):
            checkpoint.take(f"{_BASE}.weight", (_ROWS, _COLUMNS))


@pytest.mark.parametrize("name", WRITERS)
def test_codes_are_kept_where_rows_are_whole_groups(tmp_path: Path, name: str) -> None:
    """All but those of GPTQ with inputs in another order."""
    config, named, values = _written(name, 32, 96)
    with _checkpoint(tmp_path, config, named) as checkpoint:
        got = checkpoint.take_stored(f"{_BASE}.weight", (32, 96))
    assert isinstance(got, CodedMatrix) != name.endswith("desc_act")
    floats = got.floats() if isinstance(got, CodedMatrix) else got
    torch.testing.assert_close(floats, values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", WRITERS)
def test_a_rank_takes_its_part_of_the_codes(tmp_path: Path, name: str) -> None:
    """Whole rows stay codes; columns do where they are whole groups."""
    config, named, values = _written(name, 32, 256)
    rows, half, odd = range(8, 24), range(128, 256), range(40, 200)
    for part, columns in ((rows, None), (None, half), (None, odd), (rows, half)):
        with _checkpoint(tmp_path, config, named) as checkpoint:
            got = checkpoint.take_stored(f"{_BASE}.weight", (32, 256), part, columns)
        # A scale of whole rows fits any columns.
        is_cut = columns is odd and name != "int8"
        assert isinstance(got, torch.Tensor) == (name.endswith("desc_act") or is_cut)
        expected = values if part is None else values[part.start : part.stop]
        expected = expected if columns is None else expected[:, columns.start : columns.stop]
        torch.testing.assert_close(to_floats(got), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({f"{_NAME}_scale_inv": torch.ones(3, 2)}, r"fp8 matrix .*down_proj of model.safetensors: .*shape \[3, 2\]"),
        (
            {f"{_NAME}_scale_inv": torch.full((3, 3), float("nan"))},
            r"down_proj of model.safetensors: scales that are not",
        ),
        ({_NAME: torch.zeros(70, 100)}, r"down_proj of model.safetensors: torch\.float32"),
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
        (GPTQ | {"bits": 8}, "bits=8"),
        (GPTQ | {"dynamic": {"a": 1}}, "dynamic"),
        (GPTQ | {"dynamic": {"-:a": {}, "+:b": {"bits": 8}}}, "dynamic.*bits"),
        (GPTQ | {"format": "gptq_v2"}, "format='gptq_v2'"),
        (GPTQ | {"checkpoint_format": None, "format": "marlin"}, "format='marlin'"),
        (AWQ | {"format": "gemv"}, "format='gemv'"),
        (FP8 | {"scale_fmt": "ue8m0"}, "ue8m0"),
        (AWQ | {"version": "marlin"}, "marlin"),
        (AWQ | {"group_size": None}, "group_size=None"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
        (COMPRESSED | {"transform_config": {"R1": {}}}, "transform_config"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (COMPRESSED | {"format": "marlin-24"}, "marlin-24"),
        (
            compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=8, actorder="group"),
            "actorder",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}},
            "MIXED_PRECISION",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size=32"),
        (COMPRESSED | {"config_groups": {}}, "config_groups"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.*sparse-24"),
        (compressed("float-quantized", type="float", num_bits=4, strategy="channel"), "num_bits=4"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(TandemError, match=named):
        read_stored_formats(config)


# What transformers and GPTQModel write beside the fields that describe the tensors.
_WRITTEN = {
    "act_group_aware": True, "backend": "auto", "batch_size": 1, "block_name_to_quantize": "model.layers",
    "cache_block_outputs": True, "damp_percent": 0.01, "dataset": None, "exllama_config": {"version": 1},
    "max_input_length": None, "model_seqlen": 2048, "module_name_preceding_first_block": ["model.embed_tokens"],
    "modules_in_block_to_quantize": [["self_attn.q_proj"]], "pad_token_id": 2, "sym": True, "tokenizer": None,
    "true_sequential": True, "use_cuda_fp16": True, "use_exllama": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "same"),
    [
        (GPTQ | _WRITTEN | {"checkpoint_format": None, "desc_act": False}, GPTQ),
        (GPTQ | _WRITTEN | {"format": "gptq", "dynamic": {"-:.*mlp.gate.*": {}}, "lm_head": False}, GPTQ),
        (GPTQ | {"checkpoint_format": None, "format": "gptq_v2"}, GPTQ | {"checkpoint_format": "gptq_v2"}),
        (GPTQ | {"lm_head": True}, GPTQ),
        (AWQ | _WRITTEN | {"format": "gemm"}, AWQ),
        (COMPRESSED | {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}, COMPRESSED),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, COMPRESSED),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, {}),
        (FP8 | {"scale_fmt": "float", "expert_dtype": "fp8", "modules_to_convert": None, "dequantize": False}, FP8),
    ],
)
def test_fields_about_the_making_of_weights_are_accepted(config: dict[str, Any], same: dict[str, Any]) -> None:
    assert read_stored_formats(config) == read_stored_formats(same)
