"""Test random weights: real shapes, the same numbers from one seed everywhere, and no weight file on disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tandem.core.config import ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockId, SeqId
from tandem.core.model_catalog import PUBLISHED
from tandem.core.request import SamplingParams
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.fingerprint import weights_digest
from tandem.runtime.input_batch import build_batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_config import parse_model_config, read_model_config
from tandem.runtime.model_store import resolve_model
from tandem.runtime.models.decoder import Decoder
from tandem.runtime.random_weights import RandomWeights, open_weights
from tandem.runtime.tokenizer_bundle import read_bundle
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, StepPlan
from tests.unit.runtime.conftest import load

TINY = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_shape_is_a_model_that_we_compute(name: str, tmp_path: Path) -> None:
    directory = resolve_model(f"random:{name}", tmp_path)
    config = read_model_config(directory)
    assert config.vocab_size == PUBLISHED[name].config["vocab_size"]
    assert (config.query_key_norm == "head") == name.startswith("qwen3")
    assert not list(directory.glob("*.safetensors"))


def test_its_tokenizer_knows_every_text_and_every_id(tmp_path: Path) -> None:
    directory = resolve_model("random:smollm2-135m", tmp_path)
    config = read_model_config(directory)
    bundle = read_bundle(directory, config)
    tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
    text = "Grüße, 世界!\n\t <|x|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert tokenizer.decode([300, 40_000]) == " t300 t40000"
    assert json.loads(bundle.special_tokens_json)["eos_token_ids"] == [config.vocab_size - 1]
    assert "assistant" in bundle.chat_template


@pytest.mark.slow
def test_a_digest_is_a_function_of_name_and_seed(tmp_path: Path) -> None:
    ids = ["random:qwen3-8b", "random:qwen3-8b@0", "random:qwen3-8b@1", "random:llama-3.1-8b"]
    first, same, other_seed, other_name = (weights_digest(resolve_model(i, tmp_path), tmp_path) for i in ids)
    assert first == same and len({first, other_seed, other_name}) == 3


@pytest.mark.parametrize("model_id", ["random:gpt-5", "random:", "random:qwen3-8b/x"])
def test_an_unknown_name_lists_the_known_ones(model_id: str, tmp_path: Path) -> None:
    with pytest.raises(TandemError, match=r"random:llama-3\.1-8b") as caught:
        resolve_model(model_id, tmp_path)
    assert caught.value.kind is ErrorKind.MODEL_NOT_FOUND and caught.value.param == "model"


@pytest.mark.parametrize("seed", ["", "x", "-1", "1.5", str(1 << 64)])
def test_a_seed_is_a_number(seed: str, tmp_path: Path) -> None:
    with pytest.raises(TandemError, match="seed") as caught:
        resolve_model(f"random:qwen3-8b@{seed}", tmp_path)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST and caught.value.param == "model"


def test_numbers_depend_on_seed_tensor_and_place_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (96, 64)
    whole = RandomWeights(5, 4, torch.float32).take("a.weight", shape)
    monkeypatch.setattr("tandem.runtime.random_weights._CHUNK", 1000)
    assert torch.equal(RandomWeights(5, 4, torch.float32).take("a.weight", shape), whole)
    assert torch.equal(RandomWeights(5, 4, torch.bfloat16).take("a.weight", shape), whole.to(torch.bfloat16))
    source = RandomWeights(5, 4, torch.float32)
    assert torch.equal(source.take("a.weight", shape, rows=range(1, 3)), whole[1:3])
    assert torch.equal(source.take("a.weight", shape, columns=range(2, 3)), whole[:, 2:3])
    for seed, name in ((6, "a.weight"), (5, "b.weight")):
        other = RandomWeights(seed, 4, torch.float32).take(name, shape)
        assert abs(float(torch.corrcoef(torch.stack((other.flatten(), whole.flatten())))[0, 1])) < 0.05
    # SplitMix64 in Python's own integers.
    for place in (0, 1, 6143):
        assert float(whole.flatten()[place]) == pytest.approx(
            _random_weight(5, "a.weight", place) * (3 / 64) ** 0.5, rel=1e-6
        )


def _random_weight(seed: int, name: str, place: int) -> float:
    mask = (1 << 64) - 1
    key = int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little")
    word = ((place + 1) * 0x9E3779B97F4A7C15 + key) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return ((word ^ (word >> 31)) >> 40) / 2**23 - 1 + 2**-24


@pytest.mark.parametrize("chunk", [1 << 24, 100])
def test_a_rank_generates_its_part_of_the_same_numbers(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.runtime.random_weights._CHUNK", chunk)
    source = RandomWeights(5, 4, torch.float32)
    whole = source.take("a.weight", (24, 40))
    assert torch.equal(source.take("a.weight", (24, 40), rows=range(6, 19)), whole[6:19])
    assert torch.equal(source.take("a.weight", (24, 40), columns=range(8, 16)), whole[:, 8:16])
    assert torch.equal(source.take("a.weight", (24, 40), range(1, 3), range(5)), whole[1:3, :5])
    assert source.take("norm.weight", (40,), rows=range(4, 9)).shape == (5,)


def test_a_checkpoint_reads_the_same_part(model_dir: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with open_weights(model_dir, torch.float64) as whole, open_weights(model_dir, torch.float64) as part:
        expected = whole.take(name, (48, 32))
        assert torch.equal(part.take(name, (48, 32), rows=range(5, 9), columns=range(8, 16)), expected[5:9, 8:16])


def test_spread_is_what_keeps_activations() -> None:
    source = RandomWeights(1, 8, torch.float32)
    plain = source.take("model.layers.0.mlp.up_proj.weight", (400, 250))
    residual = source.take("model.layers.0.mlp.down_proj.weight", (400, 250))
    assert float(plain.var()) == pytest.approx(1 / 250, rel=0.02) and abs(float(plain.mean())) < 1e-3
    assert float(residual.var()) == pytest.approx(1 / 250 / 16, rel=0.02)
    assert torch.equal(source.take("model.norm.weight", (7,)), torch.ones(7))


@pytest.mark.parametrize("layers", [2, 80])
@pytest.mark.parametrize("tied", [False, True])
def test_activations_stay_finite_and_of_one_size_through_all_layers(layers: int, tied: bool) -> None:
    config = parse_model_config(TINY | {"num_hidden_layers": layers, "tie_word_embeddings": tied})
    decoder = Decoder(config, RandomWeights(0, layers, torch.float32))
    cache = KVCache(KVLayout(16, (KVGroup(layers, 2, 16, "float32"),)), 4)
    tokens = tuple((7 * i) % 300 for i in range(50))
    piece = ScheduledSlice(SeqId(1), 0, 50, tokens, tuple(map(BlockId, range(4))), None)
    hidden = decoder.forward(build_batch([piece], [tokens], 16), cache)
    assert 0.05 < float(hidden.pow(2).mean().sqrt()) < 5
    logits = decoder.logits(hidden)
    assert bool(logits.isfinite().all()) and 0.3 < float(logits.std()) < 3


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a published shape that is small."""
    small = type(PUBLISHED["smollm2-135m"])(TINY | {"num_hidden_layers": 2}, "made up")
    monkeypatch.setattr("tandem.runtime.random_model.PUBLISHED", {"tiny": small})
    return resolve_model("random:tiny", tmp_path)


def test_an_executor_with_random_weights_computes_and_writes_no_weight_file(tiny: Path, tmp_path: Path) -> None:
    executor = load(tiny, ModelConfig(id="random:tiny"))
    piece = ScheduledSlice(
        SeqId(1), 0, 3, (4, 5, 6), (BlockId(0),), Sampling(SamplingParams(max_tokens=2, temperature=0.0), 0, 0)
    )
    (result,) = executor.execute(StepPlan(1, (piece,))).slices
    assert result.error is None and len(result.tokens) == 1
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 1 << 20
    again = open_weights(tiny, torch.float32).take("x", (3, 3))
    assert torch.equal(again, RandomWeights(0, 2, torch.float32).take("x", (3, 3)))


def test_compiled_kernels_are_refused_for_them(tiny: Path) -> None:
    with pytest.raises(TandemError, match="weights are random"):
        load(tiny, ModelConfig(id="random:tiny"), kernels="compiled")
