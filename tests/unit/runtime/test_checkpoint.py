"""Test single and sharded weight files; missing, superfluous and misshapen tensors are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.core.errors import TandemError
from tandem.runtime.fingerprint import weights_digest
from tests.unit.runtime.conftest import CONFIG, load, logits_of, tensors


def _logits(directory: Path) -> torch.Tensor:
    return logits_of(load(directory))


def _shard(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    names = sorted(tensors())
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors().items() if weight_map[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_one_model(model_dir: Path) -> None:
    whole = _logits(model_dir)
    _shard(model_dir)
    assert torch.equal(_logits(model_dir), whole)


def test_missing_shard_is_named(model_dir: Path) -> None:
    _shard(model_dir)
    (model_dir / "model-1.safetensors").unlink()
    with pytest.raises(TandemError, match="model-1"):
        _logits(model_dir)


def test_index_cannot_point_elsewhere(model_dir: Path) -> None:
    index = {"weight_map": {"a": "../model.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TandemError, match="has no "):
        _logits(model_dir)


def test_tied_embeddings_need_no_head(model_dir: Path) -> None:
    weights = tensors() | {"lm_head.weight": tensors()["model.embed_tokens.weight"].clone()}
    save_file(weights, model_dir / "model.safetensors")
    untied = _logits(model_dir)
    del weights["lm_head.weight"]
    save_file(weights, model_dir / "model.safetensors")
    with pytest.raises(TandemError, match="lm_head"):
        _logits(model_dir)
    (model_dir / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    assert torch.equal(_logits(model_dir), untied)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.layers.0.self_attn.q_proj.bias": torch.tensor([0.0] * 31 + [1e-3])}, r"q_proj\.bias"),
        (
            {"model.layers.1.mlp.up_proj.weight": torch.zeros(48, 31)},
            r"up_proj\.weight of model\.safetensors has shape \[48",
        ),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, "int8"),
    ],
)
def test_unfit_tensors_are_named(model_dir: Path, change: dict[str, torch.Tensor], named: str) -> None:
    save_file(tensors() | change, model_dir / "model.safetensors")
    with pytest.raises(TandemError, match=named):
        _logits(model_dir)


def test_biases_of_zeros_are_no_biases(model_dir: Path) -> None:
    """GPTQ checkpoints may have one for each matrix, whatever config.json says."""
    expected = _logits(model_dir)
    biases = {name.replace(".weight", ".bias"): torch.zeros(len(matrix)) for name, matrix in tensors().items()}
    save_file(tensors() | biases, model_dir / "model.safetensors")
    assert torch.equal(_logits(model_dir), expected)


def test_broken_file_is_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(TandemError, match=r"model\.safetensors cannot be read"):
        _logits(model_dir)


def test_digest_follows_the_bytes_and_is_kept(model_dir: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = weights_digest(model_dir, cache)
    assert weights_digest(model_dir, cache) == first
    (kept,) = (cache / "digests").iterdir()
    kept.write_text("from the cache")
    assert weights_digest(model_dir, cache) == "from the cache"
    weights = tensors()
    weights["model.norm.weight"][0] += 1
    save_file(weights, model_dir / "model.safetensors")
    assert weights_digest(model_dir, cache) not in (first, "from the cache")
    (model_dir / "weights.digest").write_text("written by the import")
    assert weights_digest(model_dir, cache) == "written by the import"
