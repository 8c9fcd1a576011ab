"""Read the tokenizer files of a model directory, which a gateway needs to encode and decode text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tandem.core.bundle import TokenizerBundle
from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.architectures.fields import token_ids
from tandem.runtime.architectures.spec import DecoderSpec
from tandem.runtime.json_file import read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_bundle(directory: Path, config: DecoderSpec) -> TokenizerBundle:
    """Read tokenizer, chat template, generation config and special tokens of a model directory.

    Raises TandemError when tokenizer.json is missing, or a file is not valid JSON or not a usable tokenizer.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TandemError(
            ErrorKind.MODEL_NOT_FOUND,
            f"model directory {directory} has no tokenizer.json: save the model's fast tokenizer there",
            param="model",
        )
    tokenizer_json = path.read_bytes()
    settings = read_json(directory / "tokenizer_config.json")
    generation = read_json(directory / "generation_config.json")
    special = _special_tokens(_parse_tokenizer(tokenizer_json, path), settings, generation, config)
    return TokenizerBundle(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(directory, settings),
        generation_config_json=json.dumps(generation, sort_keys=True),
        special_tokens_json=json.dumps(special, sort_keys=True),
    )


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str:
    """Return the content of chat_template.jinja, else the `chat_template` field of tokenizer_config.json.

    The field may list several templates by name; then the one named "default" is used."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", "")
    return str(template)


def _special_tokens(
    tokenizer: Tokenizer, settings: Mapping[str, Any], generation: Mapping[str, Any], config: DecoderSpec
) -> dict[str, Any]:
    texts = {name: text for name in _NAMES if (text := _text(settings.get(name))) is not None}
    ends = config.eos_token_ids | token_ids(generation.get("eos_token_id"))
    begin = generation.get("bos_token_id", config.bos_token_id)
    if "bos_token" in texts:
        begin = tokenizer.token_to_id(texts["bos_token"])
    if "eos_token" in texts:
        ends |= token_ids(tokenizer.token_to_id(texts["eos_token"]))
    flags = {name: settings.get(name) for name in ("add_bos_token", "add_eos_token")}
    return {"eos_token_ids": sorted(ends), "bos_token_id": begin, **flags, **texts}


def _parse_tokenizer(tokenizer_json: bytes, path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise TandemError(ErrorKind.UNSUPPORTED, f"{path} is not a usable tokenizer: {error}", param="model") from None


def _text(token: Any) -> str | None:
    """Return the text of a token of tokenizer_config.json, which is a string or an object with a `content` field."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None
