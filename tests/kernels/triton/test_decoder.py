"""A whole decoder on Triton's kernels says what it says on the plain ones, over prefill chunks, decodes and both; an
executor on top of it draws the same tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.core.config import EngineConfig
from tandem.core.ids import BlockId, SeqId
from tandem.core.request import SamplingParams
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.cuda_stream import CudaStream
from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.input_batch import Batch, build_batch
from tandem.runtime.kv_cache import KVCache, unsigned
from tandem.runtime.model_config import read_model_config
from tandem.runtime.model_loader import compose_executor
from tandem.runtime.models.decoder import Decoder
from tandem.sched.state.step_plan import ScheduledSlice
from tandem_kernels.dispatch import REFERENCE, Kernels, triton_kernels
from tandem_kernels.reference import block_digest
from tests.golden.steps import generate
from tests.kernels.triton.test_attention import shorten_slices

_CPU = torch.device("cpu")

_BLOCK_SIZE, _BLOCKS, _VOCAB = 16, 12, 50
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": _QWEN3,
    "qwen3 of one layer": {**_QWEN3, "num_hidden_layers": 1},
}


def _weights(name: str) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(9)
    dim = _CONFIGS[name].get("head_dim", 24)
    hidden, inner, query, kv = 96, 80, 4 * dim, 2 * dim
    shapes = {"model.embed_tokens": (_VOCAB, hidden), "model.norm": (hidden,), "lm_head": (_VOCAB, hidden)}
    for i in range((_SIZES | _CONFIGS[name])["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        attention = {
            "q_proj": (query, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, query),
        }
        if _CONFIGS[name]["model_type"] == "qwen3":
            attention |= {"q_norm": (dim,), "k_norm": (dim,)}
        shapes |= {f"{prefix}self_attn.{part}": shape for part, shape in attention.items()}
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        shapes |= {f"{prefix}mlp.{part}": shape for part, shape in mlp.items()}
        shapes |= {prefix + part: (hidden,) for part in ("input_layernorm", "post_attention_layernorm")}
    return {
        f"{part}.weight": torch.randn(shape, generator=source) * (0.15 if len(shape) == 2 else 1.0)
        for part, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in _CONFIGS}
    for name, directory in found.items():
        (directory / "config.json").write_text(json.dumps(_SIZES | _CONFIGS[name]))
        save_file(_weights(name), directory / "model.safetensors")
    return found


def _batch(*pieces: tuple[int, int, int]) -> Batch:
    """Of (sequence, start, stop); a sequence's tokens and blocks follow from its number."""
    slices = [
        ScheduledSlice(SeqId(s), start, stop - start, (), tuple(BlockId(5 * s + b) for b in (3, 0, 4, 2)), None)
        for s, start, stop in pieces
    ]
    tokens = [[(7 * s + 3 * place) % _VOCAB for place in range(start, stop)] for s, start, stop in pieces]
    return build_batch(slices, tokens, _BLOCK_SIZE)


def on_device(device: torch.device, batch: Batch) -> Batch:
    attention = batch.attention
    moved = {name: getattr(attention, name).to(device) for name in ("query_starts", "context_lens", "block_tables")}
    rows = {name: getattr(batch, name).to(device) for name in ("tokens", "positions", "slots")}
    return replace(batch, attention=replace(attention, **moved), **rows)


def stream_of(device: torch.device) -> DeviceStream:
    return DeviceStream() if device.type == "cpu" else CudaStream(device)


# A chunk; one over a block's end beside another prompt; a decode beside a chunk; decodes.
_STEPS = [
    ((0, 0, 13),),
    ((0, 13, 17), (1, 0, 3)),
    ((0, 17, 18), (1, 3, 7)),
    ((0, 18, 19), (1, 7, 8)),
]


def _load(
    directory: Path, dtype: torch.dtype, plane: str, kernels: Kernels, device: torch.device
) -> tuple[Decoder, KVCache]:
    config = read_model_config(directory)
    layout = KVLayout(_BLOCK_SIZE, (KVGroup(config.num_layers, config.kv_heads, config.head_dim, plane),))
    with Checkpoint(directory, dtype, device) as checkpoint:
        return Decoder(config, checkpoint, kernels=kernels), KVCache(
            layout, _BLOCKS, kernels.block_digest, aside=stream_of(device)
        )


def _logits(
    directory: Path, dtype: torch.dtype, plane: str, kernels: Kernels, device: torch.device = _CPU
) -> torch.Tensor:
    decoder, cache = _load(directory, dtype, plane, kernels, device)
    rows = [decoder.logits(decoder.forward(on_device(device, _batch(*pieces)), cache)) for pieces in _STEPS]
    return torch.cat(rows).cpu().double()


_SOME = [
    ("llama", "bfloat16", "bfloat16"),
    ("qwen3", "float32", "float8_e4m3fn"),
]
_OTHERS = [
    ("llama", "float32", "float32"),
    ("qwen3", "float32", "float32"),
    ("qwen3", "bfloat16", "bfloat16"),
    ("llama", "bfloat16", "float8_e4m3fn"),
    ("qwen3", "float16", "float16"),
]
_TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2, "float8_e4m3fn": 4e-2}


@pytest.mark.parametrize(
    ("model", "name", "plane"), [*_SOME, *(pytest.param(*case, marks=pytest.mark.nightly) for case in _OTHERS)]
)
def test_logits(models: dict[str, Path], model: str, name: str, plane: str, device: torch.device) -> None:
    """Within a tolerance of the greatest logit; a float8 key that falls to its other neighbour moves one by most."""
    dtype = getattr(torch, name)
    expected = _logits(models[model], dtype, plane, REFERENCE)
    got = _logits(models[model], dtype, plane, triton_kernels(), device)
    assert got.shape == (sum(stop - start for pieces in _STEPS for _, start, stop in pieces), _VOCAB)
    assert float((got - expected).abs().max() / expected.abs().max()) < _TOLERANCES[plane]


# The first sequence's 19 tokens: in one piece; in others, with other company; by decodes beside a prompt.
_Schedule = tuple[tuple[tuple[int, int, int], ...], ...]
_SCHEDULES: list[_Schedule] = [
    (((0, 0, 19),),),
    (((1, 0, 4), (0, 0, 5)), ((0, 5, 17), (1, 4, 6)), ((0, 17, 19),)),
    (((0, 0, 17), (1, 0, 9)), ((0, 17, 18), (1, 9, 10)), ((0, 18, 19), (1, 10, 12))),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "plane"), [("qwen3 of one layer", "float32"), ("qwen3", "float32"), ("llama", "float8_e4m3fn")]
)
def test_a_token_has_the_same_bits_in_whatever_chunk_and_company(
    models: dict[str, Path], model: str, plane: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits, and those of all before it, which are made from the KV that each way has written. Half types would
    hide most of what differs."""
    # Parts of so few tokens that other kernels split these contexts.
    shorten_slices(monkeypatch, 16, 16)
    load = models[model], torch.float32, plane
    found = [_first_sequence(schedule, *load, triton_kernels(batch_invariant=True), device) for schedule in _SCHEDULES]
    assert found[0].shape == (19, _VOCAB)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    expected = _first_sequence(_SCHEDULES[0], *load, REFERENCE, _CPU).double()
    assert float((found[0].double() - expected).abs().max() / expected.abs().max()) < _TOLERANCES[plane]
    others = [_first_sequence(schedule, *load, triton_kernels(), device) for schedule in _SCHEDULES[:2]]
    assert not torch.equal(*others), "nothing was shown: all kernels do so here"


def _first_sequence(
    schedule: _Schedule, directory: Path, dtype: torch.dtype, plane: str, kernels: Kernels, device: torch.device
) -> torch.Tensor:
    """Its logits."""
    decoder, cache = _load(directory, dtype, plane, kernels, device)
    found = []
    for pieces in schedule:
        logits = decoder.logits(decoder.forward(on_device(device, _batch(*pieces)), cache))
        rows = logits.split([stop - start for _, start, stop in pieces])
        found.append(rows[[seq for seq, *_ in pieces].index(0)])
    return torch.cat(found).cpu()


_PROMPTS = [[(7 * i + 3 * place) % _VOCAB for place in range(length)] for i, length in enumerate((3, 13, 25))]


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.0, marks=pytest.mark.nightly)])
def test_tokens_of_overlapping_steps(models: dict[str, Path], temperature: float, device: torch.device) -> None:
    """Chunks, decodes as graphs, ids that only the device knows, draws of the device; digests of what was written."""
    params = SamplingParams(max_tokens=4, temperature=temperature, top_k=20, top_p=0.9, seed=11)
    engine = EngineConfig(max_num_seqs=4, max_model_len=64)
    outputs = []
    for kernels, place in ((REFERENCE, _CPU), (triton_kernels(), device)):
        decoder, cache = _load(models["qwen3"], torch.float32, "float32", kernels, place)
        executor = compose_executor(decoder, cache, kernels, stream_of(place), engine, None)
        outputs.append(generate(executor, _PROMPTS, 4, chunk=12, chained=True, stagger=1, params=params))
        written = cache.pool.cpu()
        blocks = [BlockId(block) for block in range(_BLOCKS)]
        words = block_digest(written, torch.arange(_BLOCKS), torch.arange(_BLOCKS))
        assert cache.digest(blocks, blocks) == unsigned(words)
    assert outputs[0] == outputs[1]
    assert len({token for output in outputs[0] for token in output}) > 2
