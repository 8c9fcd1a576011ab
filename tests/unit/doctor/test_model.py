"""Test the check of a model's files and of the cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.core.config import ModelConfig
from tandem.doctor.model import NEEDED_BYTES, Cache, ModelFacts, judge_model, read_model
from tandem.runtime.model_store import find_local_model, resolve_model
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns, verdicts

ROOM = Cache("/cache", NEEDED_BYTES)
HERE = ModelFacts("smol", ROOM, "/cache/smol", num_bytes=513 << 20)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    found.mkdir()
    (found / "config.json").write_text(json.dumps(CONFIG))
    (found / "tokenizer.json").write_text("{}")
    (found / "model.safetensors").write_bytes(b"0" * (2 << 20))
    return found


def read(directory: Path) -> ModelFacts:
    found = read_model(ModelConfig(id=str(directory), cache_dir=str(directory.parent / "cache")))
    assert found is not None
    return found


def test_a_directory_that_is_complete(directory: Path) -> None:
    found = read(directory)
    assert (found.directory, found.missing, found.problem, found.num_bytes) == (str(directory), (), "", 2 << 20)
    assert (found.cache.path, found.cache.problem) == (str(directory.parent / "cache"), "")
    assert found.cache.num_free_bytes > 0


def test_one_of_many_files_that_is_missing(directory: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "one.safetensors").write_bytes(b"")
    (directory / "tokenizer.json").unlink()
    found = read(directory)
    assert found.missing == ("tokenizer.json", "two.safetensors")
    model, _ = judge_model(found)
    assert_fails(model, "model", "it lacks tokenizer.json, two.safetensors", f"remove {directory}")


def test_a_malformed_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("[]")
    assert read(directory).missing == ("model.safetensors.index.json (readable)",)


def test_a_model_that_no_worker_would_load(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, "model_type": "gpt2"}))
    model, _ = judge_model(read(directory))
    assert_fails(model, "model", "model_type='gpt2'", "a --model that is an alias")
    nowhere, _ = judge_model(read(directory / "none"))
    assert_fails(nowhere, "model", "is no alias", "a --model that is an alias")


def test_a_model_that_is_here() -> None:
    model, cache = judge_model(HERE)
    assert_fine(model, "model", "smol in /cache/smol, 513MiB of weights")
    assert_fine(cache, "cache", "4GiB are free in /cache")


def test_a_model_that_is_not_fetched_yet(tmp_path: Path) -> None:
    found = read_model(ModelConfig(cache_dir=str(tmp_path / "none")))
    assert found is not None and (found.directory, found.problem) == ("", "")
    model, cache = judge_model(replace(found, cache=ROOM))
    assert_warns(model, "model", "smollm2-135m-instruct is not on this machine yet", "the first worker fetches it")
    assert_fine(cache, "cache", "4GiB are free")
    full = judge_model(ModelFacts("smol", Cache("/cache", 1 << 30)))[1]
    assert_warns(full, "cache", "1GiB are free in /cache, and the model is not fetched yet", "--model-cache-dir")
    closed = judge_model(ModelFacts("smol", Cache("/cache", 1 << 40, "/ cannot be written by user 7")))[1]
    assert_fails(closed, "cache", "/ cannot be written by user 7", "the volume of `cache`")


def test_a_read_only_cache_is_fine_for_a_model_that_is_here() -> None:
    _, cache = judge_model(replace(HERE, cache=Cache("/cache", 0, "read-only")))
    assert_fine(cache, "cache", "nothing needs to be written")


def test_without_torch_no_model_runs() -> None:
    assert verdicts(judge_model(None)) == [("model", "skip")]
    assert_skips(judge_model(None)[0], "model", "torch is not installed")


def test_the_check_neither_fetches_nor_creates_anything(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    for model_id in ("smollm2-135m-instruct", "random:smollm2-135m@7", str(gguf), "nobody/nothing-of-this-name"):
        assert find_local_model(model_id, cache) is None
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_a_converted_model_is_found(tmp_path: Path) -> None:
    made = resolve_model("random:smollm2-135m@7", tmp_path)
    assert find_local_model("random:smollm2-135m@7", tmp_path) == made
    facts = read_model(ModelConfig(id="random:smollm2-135m@7", cache_dir=str(tmp_path)))
    assert facts is not None and (facts.directory, facts.missing, facts.problem) == (str(made), (), "")
