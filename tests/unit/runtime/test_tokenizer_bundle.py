"""Test that the tokenizer bundle has the model's files and the union of its end-of-sequence tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from tandem.core.bundle import TokenizerBundle
from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.model_config import parse_model_config
from tandem.runtime.tokenizer_bundle import read_bundle
from tests.unit.runtime.conftest import CONFIG


def _directory(tmp_path: Path, **files: Any) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def _special(bundle: TokenizerBundle) -> dict[str, Any]:
    special: dict[str, Any] = json.loads(bundle.special_tokens_json)
    return special


_MODEL = parse_model_config(CONFIG | {"bos_token_id": 7})


def test_ends_are_the_union(tmp_path: Path) -> None:
    bundle = read_bundle(_directory(tmp_path, generation_config={"eos_token_id": [5, 4], "temperature": 0.6}), _MODEL)
    assert _special(bundle)["eos_token_ids"] == [3, 4, 5]
    assert json.loads(bundle.generation_config_json)["temperature"] == 0.6


def test_the_end_of_the_tokenizer_is_one_too(tmp_path: Path) -> None:
    """As in vLLM: templates of chats end each turn with it, also where the configurations name another token."""
    directory = _directory(tmp_path, tokenizer_config={"eos_token": {"content": "</s>"}})
    bundle = read_bundle(directory, parse_model_config(CONFIG | {"eos_token_id": None}))
    assert _special(bundle)["eos_token_ids"] == [1]
    assert _special(read_bundle(directory, _MODEL))["eos_token_ids"] == [1, 3]
    unknown = _directory(tmp_path, tokenizer_config={"eos_token": "</none>"})
    assert _special(read_bundle(unknown, _MODEL))["eos_token_ids"] == [3]


def test_special_tokens_by_name(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "add_bos_token": True}
    special = _special(read_bundle(_directory(tmp_path, tokenizer_config=settings), _MODEL))
    assert special["bos_token"] == "<s>" and special["bos_token_id"] == 0
    assert special["eos_token"] == "</s>" and "pad_token" not in special
    assert special["add_bos_token"] is True and special["add_eos_token"] is None


def test_beginning_by_id_when_no_text_is_known(tmp_path: Path) -> None:
    assert _special(read_bundle(_directory(tmp_path), _MODEL))["bos_token_id"] == 7


def test_template_file_beats_the_field(tmp_path: Path) -> None:
    directory = _directory(tmp_path, tokenizer_config={"chat_template": "field"})
    assert read_bundle(directory, _MODEL).chat_template == "field"
    (directory / "chat_template.jinja").write_text("file")
    assert read_bundle(directory, _MODEL).chat_template == "file"


def test_named_templates_and_none(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert read_bundle(_directory(tmp_path, tokenizer_config={"chat_template": named}), _MODEL).chat_template == "d"
    assert read_bundle(_directory(tmp_path, tokenizer_config={}), _MODEL).chat_template == ""


def test_digest_follows_every_part() -> None:
    bundle = TokenizerBundle(b"t", "c", "g", "s")
    changed = [
        replace(bundle, tokenizer_json=b"u"),
        replace(bundle, chat_template="d"),
        replace(bundle, generation_config_json="h"),
        replace(bundle, special_tokens_json="r"),
        TokenizerBundle(b"tc", "", "g", "s"),
    ]
    assert len({bundle.digest, *(other.digest for other in changed)}) == 6


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(TandemError, match=r"tokenizer\.json") as caught:
        read_bundle(tmp_path, _MODEL)
    assert caught.value.kind is ErrorKind.MODEL_NOT_FOUND
    directory = _directory(tmp_path, generation_config=[1])
    with pytest.raises(TandemError, match="generation_config"):
        read_bundle(directory, _MODEL)
    (directory / "generation_config.json").unlink()
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(TandemError, match=r"tokenizer\.json is not a usable tokenizer"):
        read_bundle(directory, _MODEL)
