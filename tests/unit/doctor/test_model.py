"""Test the check of a model's files and of the cache."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.core.config import ModelConfig
from tandem.doctor.finding import Finding
from tandem.doctor.model import NEEDED_BYTES, check_model
from tandem.runtime.model_store import find_local_model, resolve_model
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns

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


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    """Return a function that sets the free bytes of the cache and why it cannot be written, empty if it can."""

    def set_disk(num_free_bytes: int, problem: str = "") -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=num_free_bytes))
        monkeypatch.setattr("tandem.doctor.model._unwritable", lambda _: problem)

    return set_disk


def check(directory: Path) -> tuple[Finding, ...]:
    return check_model(ModelConfig(id=str(directory), cache_dir=str(directory.parent / "cache")))


def test_a_directory_that_is_complete(directory: Path, disk: Callable[[int, str], None]) -> None:
    disk(NEEDED_BYTES, "")
    model, cache = check(directory)
    assert_fine(model, "model", f"{directory} in {directory}, 2MiB of weights")
    assert_fine(cache, "cache", f"4GiB are free in {directory.parent / 'cache'}")


def test_one_of_many_files_that_is_missing(directory: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "one.safetensors").write_bytes(b"")
    model, _ = check(directory)
    assert_fails(model, "model", "no two.safetensors", f"remove {directory}")
    (directory / "tokenizer.json").unlink()
    assert_fails(check(directory)[0], "model", "it lacks tokenizer.json", f"remove {directory}")


def test_a_malformed_index(directory: Path) -> None:
    for text in ("[]", '{"weight_map": {"a": [1]}}', "[" * 100_000):
        (directory / "model.safetensors.index.json").write_text(text)
        assert_fails(check(directory)[0], "model", "model.safetensors.index.json is not an index of weights", "remove")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "m" * 300}}))
    assert_fails(check(directory)[0], "model", "no " + "m" * 300, "remove")


def test_a_model_that_no_worker_would_load(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, "model_type": "gpt2"}))
    model, _ = check(directory)
    assert_fails(model, "model", "model_type='gpt2'", "a --model that is an alias")
    nowhere, _ = check(directory / "none")
    assert_fails(nowhere, "model", str(directory / "none"), "a --model that is an alias")


def test_a_model_that_is_not_fetched_yet(tmp_path: Path, disk: Callable[[int, str], None]) -> None:
    config = ModelConfig(cache_dir=str(tmp_path / "none"))
    disk(NEEDED_BYTES, "")
    model, cache = check_model(config)
    assert_warns(model, "model", "smollm2-135m-instruct is not on this machine yet", "let the first worker fetch it")
    assert_fine(cache, "cache", "4GiB are free")
    disk(1 << 30, "")
    full = check_model(config)[1]
    assert_warns(full, "cache", f"1GiB are free in {tmp_path}/none, and the model is not fetched", "--model-cache-dir")
    disk(1 << 40, "/ cannot be written by user 7")
    assert_fails(check_model(config)[1], "cache", "/ cannot be written by user 7", "the volume of `cache`")


def test_a_read_only_cache_is_fine_for_a_model_that_is_here(directory: Path, disk: Callable[[int, str], None]) -> None:
    disk(0, "read-only")
    assert_fine(check(directory)[1], "cache", "nothing needs to be written")


def test_without_torch_no_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tandem.runtime.model_store", None)
    (finding,) = check_model(ModelConfig())
    assert_skips(finding, "model", "torch is not installed")


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
    model, _ = check_model(ModelConfig(id="random:smollm2-135m@7", cache_dir=str(tmp_path)))
    assert_fine(model, "model", f"in {made}")
