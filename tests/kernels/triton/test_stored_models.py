"""Whole decoders with weights in few bits on Triton's kernels, against the plain kernels on the restored weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.ids import BlockId, SeqId
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.input_batch import build_batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_config import read_model_config
from tandem.runtime.models.decoder import Decoder, Linear, MixtureMlp
from tandem.sched.state.step_plan import ScheduledSlice
from tandem_kernels.device_codes import DeviceCodes
from tandem_kernels.dispatch import REFERENCE, Kernels, Weight, triton_kernels
from tandem_kernels.reference.coded import round_to_float8
from tests.kernels.triton.tensors import rounded_rows
from tests.kernels.triton.test_decoder import on_device, stream_of
from tests.stored_formats import FP8

# Where a GPU is lent there may be none of the packages that only servers need.
_MODELS: Any = pytest.importorskip("tests.golden.models", exc_type=ImportError)
_WRITERS: Any = pytest.importorskip("tests.golden.stored_formats", exc_type=ImportError)
_CPU = torch.device("cpu")
_ROWS = 7
_FP8 = FP8 | {"weight_block_size": [32, 192]}


def _stored(folder: Path, model: str, name: str) -> Path:
    """Return a directory of a tiny model whose projections are in a format."""
    config = _MODELS.TINY[model]()
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    config.num_hidden_layers = 1
    plain = _MODELS.make_random(config, 5, folder / "plain", "float32")
    written, _ = (
        _WRITERS.write_quantised(plain, folder, _FP8) if name == "fp8" else _WRITERS.write_random(plain, folder, name)
    )
    return written.directory


def _decoder(directory: Path, kernels: Kernels, device: torch.device, quantization: str = "none") -> Decoder:
    config = read_model_config(directory)
    with Checkpoint(directory, torch.float32, device, stored=config.stored) as checkpoint:
        return Decoder(config, checkpoint, quantization, kernels)


def _logits(decoder: Decoder, kernels: Kernels, device: torch.device) -> torch.Tensor:
    config = decoder.config
    layout = KVLayout(16, (KVGroup(config.num_layers, config.kv_heads, config.head_dim, "float32"),))
    cache = KVCache(layout, 2, kernels.block_digest, aside=stream_of(device))
    piece = ScheduledSlice(SeqId(0), 0, _ROWS, (), (BlockId(1),), None)
    batch = build_batch([piece], [_MODELS.random_prompt(_ROWS, 3)], 16)
    return decoder.logits(decoder.forward(on_device(device, batch), cache)).cpu().double()


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.std())


def _weights(decoder: Decoder) -> list[Weight]:
    """Return the matrices of the first layer, without norms and routers."""
    layer = decoder._layers[0]
    mlp = layer.mlp
    of_mlp = () if isinstance(mlp, MixtureMlp) else (mlp.gate_up, mlp.down)
    parts = (layer.qkv, layer.output, *of_mlp)
    found = [part.weight for part in parts if isinstance(part, Linear)]
    assert len(found) == len(parts)
    return [*found, mlp.gate_up, mlp.down] if isinstance(mlp, MixtureMlp) else found


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qwen2", "awq"),  # has biases
        ("qwen3-moe", "fp8"),
        pytest.param("qwen3-moe", "mxfp4", marks=pytest.mark.nightly),
        pytest.param("llama", "nvfp4", marks=pytest.mark.nightly),
    ],
)
def test_logits(tmp_path: Path, model: str, name: str, device: torch.device) -> None:
    directory, kernels = _stored(tmp_path, model, name), triton_kernels()
    decoder = _decoder(directory, kernels, device)
    assert all(isinstance(weight, DeviceCodes) for weight in _weights(decoder))
    expected = _logits(_decoder(directory, REFERENCE, _CPU), REFERENCE, _CPU)
    assert _distance(_logits(decoder, kernels, device), expected) < 1e-4


def test_fp8_leaves_other_formats_as_they_are(tmp_path: Path, device: torch.device) -> None:
    directory, kernels = _stored(tmp_path, "llama", "awq"), triton_kernels()
    exact = _logits(_decoder(directory, REFERENCE, _CPU), REFERENCE, _CPU)
    assert _distance(_logits(_decoder(directory, kernels, device, "fp8"), kernels, device), exact) < 1e-4


@pytest.mark.parametrize("is_stored", [False, True])
def test_fp8_rounds_rows_and_floats(tmp_path: Path, is_stored: bool, device: torch.device) -> None:
    """Float8 weights stay as they are and floats are rounded; the head and embeddings are not."""
    stored, kernels = _stored(tmp_path, "llama", "fp8"), triton_kernels()
    directory = stored if is_stored else tmp_path / "plain"
    decoder = _decoder(directory, kernels, device, "fp8")
    assert all(isinstance(weight, DeviceCodes) and weight.rounds_rows for weight in _weights(decoder))
    exact = _decoder(directory, REFERENCE, _CPU)
    head = exact._head
    assert isinstance(head, Linear)

    def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(weight, torch.Tensor)
        if weight.shape == head.weight.shape:
            return REFERENCE.linear(x, weight, bias)
        matrix = weight if is_stored else round_to_float8(weight).floats()
        return REFERENCE.linear(rounded_rows(x), matrix, bias)

    rounded = replace(REFERENCE, linear=linear)
    expected = _logits(_decoder(directory, rounded, _CPU), rounded, _CPU)
    got = _logits(decoder, kernels, device)
    # Sums in another order move a few numbers to the other side of a tie.
    assert _distance(got, expected) < 0.05 < _distance(got, _logits(exact, REFERENCE, _CPU))
