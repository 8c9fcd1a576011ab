"""Whole decoders with weights in few bits on Triton's kernels, against the plain kernels on the restored weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.core.ids import BlockId, SeqId
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.cuda_stream import CudaStream
from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.input_batch import build_batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_config import read_model_config
from tandem.runtime.models.decoder import Decoder
from tandem.runtime.parallel.communicator import ALONE, Communicator
from tandem.runtime.parallel.shard import WHOLE, Shard
from tandem.sched.state.step_plan import ScheduledSlice
from tandem_kernels.device_codes import DeviceCodes
from tandem_kernels.dispatch import REFERENCE, Kernels, triton_kernels
from tests.golden.models import TINY, make_random, random_prompt
from tests.golden.stored_formats import write_quantised, write_random
from tests.stored_formats import FP8

_CPU = torch.device("cpu")
_ROWS = 7


def _stored(folder: Path, model: str, name: str) -> Path:
    """Return a directory of a tiny model whose projections are in a format."""
    config = TINY[model]()
    config.num_hidden_layers = 1
    plain = make_random(config, 5, folder / "plain", "float32")
    written, _ = write_quantised(plain, folder, FP8) if name == "fp8" else write_random(plain, folder, name)
    return written.directory


def _decoder(
    directory: Path,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    quantization: str = "none",
    shard: Shard = WHOLE,
    communicator: Communicator = ALONE,
) -> Decoder:
    config = read_model_config(directory)
    with Checkpoint(directory, dtype, device, stored=config.stored) as checkpoint:
        return Decoder(config, checkpoint, quantization, kernels, shard, communicator)


def _logits(decoder: Decoder, kernels: Kernels, device: torch.device, plane: str = "float32") -> torch.Tensor:
    config = decoder.config
    layout = KVLayout(16, (KVGroup(config.num_layers, config.kv_heads, config.head_dim, plane),))
    cache = KVCache(
        layout, 2, kernels.block_digest, aside=DeviceStream() if device.type == "cpu" else CudaStream(device)
    )
    piece = ScheduledSlice(SeqId(0), 0, _ROWS, (), (BlockId(1),), None)
    batch = build_batch([piece], [random_prompt(_ROWS, 3)], 16)
    attention = batch.attention
    moved = {name: getattr(attention, name).to(device) for name in ("query_starts", "context_lens", "block_tables")}
    rows = {name: getattr(batch, name).to(device) for name in ("tokens", "positions", "slots")}
    batch = replace(batch, attention=replace(attention, **moved), **rows)
    return decoder.logits(decoder.forward(batch, cache)).cpu().double()


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.std())


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "awq"),
        ("qwen3-moe", "fp8"),
        pytest.param("qwen3-moe", "mxfp4", marks=pytest.mark.nightly),
        pytest.param("llama", "nvfp4", marks=pytest.mark.nightly),
    ],
)
def test_logits(tmp_path: Path, model: str, name: str, device: torch.device) -> None:
    directory, kernels = _stored(tmp_path, model, name), triton_kernels()
    decoder = _decoder(directory, kernels, device)
    weights = [decoder._layers[0].qkv.weight, decoder._layers[0].output.weight]
    assert all(isinstance(weight, DeviceCodes) for weight in weights)
    expected = _logits(_decoder(directory, REFERENCE, _CPU), REFERENCE, _CPU)
    assert _distance(_logits(decoder, kernels, device), expected) < 1e-4


@pytest.mark.parametrize("name", ["fp8", "awq"])
def test_fp8_rounds_what_is_float8_or_floats(tmp_path: Path, name: str, device: torch.device) -> None:
    """Weights in other formats, and their rows, are not rounded."""
    directory, kernels = _stored(tmp_path, "llama", name), triton_kernels()
    exact = _logits(_decoder(directory, REFERENCE, _CPU), REFERENCE, _CPU)
    rounded = _logits(_decoder(directory, kernels, device, quantization="fp8"), kernels, device)
    if name == "awq":
        assert _distance(rounded, exact) < 1e-4
    else:
        assert 1e-3 < _distance(rounded, exact) < 1


def test_fp8_rounds_a_model_in_floats(tmp_path: Path, device: torch.device) -> None:
    kernels = triton_kernels()
    directory = _stored(tmp_path, "llama", "fp8").parent / "plain"
    decoder = _decoder(directory, kernels, device, quantization="fp8")
    assert decoder._layers[0].qkv.weight.rounds_rows
    exact = _logits(_decoder(directory, REFERENCE, _CPU), REFERENCE, _CPU)
    assert 1e-3 < _distance(_logits(decoder, kernels, device), exact) < 1
