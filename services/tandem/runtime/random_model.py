"""Create model directories without weights: a published model's config.json, a synthetic tokenizer, and a seed.

A model id is `random:NAME` or `random:NAME@SEED`, with a NAME of `tandem.core.model_catalog.PUBLISHED`. The tokenizer
is synthetic because the published ones are not available everywhere: a text is encoded byte by byte, one token each,
and every other id decodes to a word that contains the id, so that all sampled tokens can be distinguished.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.model_catalog import PUBLISHED, RANDOM_PREFIX
from tandem.runtime.fingerprint import DIGEST_FILE
from tandem.runtime.random_weights import FORMAT, MARKER, random_digest

_SEED_BITS = 64
_END = "<|end|>"
_SPACE = "\u0120"
"""The character that stands for a space in byte-level vocabularies."""
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_random_model(model_id: str, target: Path) -> None:
    """Write the model directory of the id `model_id`, `random:NAME` or `random:NAME@SEED`, into the existing directory
    `target`.

    Raises TandemError for an unknown name or an invalid seed."""
    name, seed = _parse(model_id)
    config = dict(PUBLISHED[name].config)
    end = config["vocab_size"] - 1
    files = {
        "config.json": config | {"eos_token_id": end},
        "tokenizer.json": _tokenizer(config["vocab_size"]),
        "tokenizer_config.json": {"eos_token": _END, "chat_template": _TEMPLATE},
        MARKER: {"seed": seed},
    }
    for file, content in files.items():
        (target / file).write_text(json.dumps(content), encoding="ascii")
    (target / DIGEST_FILE).write_text(random_digest(name, seed), encoding="ascii")


def random_model_path(model_id: str, cache_dir: Path) -> Path:
    """Return the path of the model directory, below `cache_dir`, of the id `model_id`, `random:NAME` or
    `random:NAME@SEED`.

    The directory is not created. Raises TandemError for an unknown name or an invalid seed."""
    name, seed = _parse(model_id)
    return cache_dir / f"random-{name}-{seed}-{FORMAT}"


def _parse(model_id: str) -> tuple[str, int]:
    name, separator, seed = model_id.removeprefix(RANDOM_PREFIX).partition("@")
    if name not in PUBLISHED:
        known = ", ".join(RANDOM_PREFIX + published_name for published_name in PUBLISHED)
        raise TandemError(
            ErrorKind.MODEL_NOT_FOUND, f"model.id={model_id!r} does not exist: name one of {known}", param="model"
        )
    if separator and not (re.fullmatch("[0-9]+", seed) and int(seed) < 1 << _SEED_BITS):
        what = f"model.id={model_id!r}: the seed must be a whole number below 2^{_SEED_BITS}, got {seed!r}"
        raise TandemError(ErrorKind.INVALID_REQUEST, what, param="model")
    return name, int(seed or 0)


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return the content of tokenizer.json: a byte-level BPE without merges."""
    alphabet = _byte_alphabet()
    words = [*alphabet, *(f"{_SPACE}t{i}" for i in range(len(alphabet), vocab_size - 1))]
    vocabulary = {word: i for i, word in enumerate([*words, _END])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(_END, normalized=False, special=True)])
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    content["decoder"] = content["pre_tokenizer"]
    return content


def _byte_alphabet() -> list[str]:
    """List the character of each byte in GPT-2's byte-level vocabulary.

    A visible byte is its own character; the others have the characters from 256 on, in order."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    hidden = (byte for byte in range(256) if byte not in visible)
    substitutes = {byte: 256 + i for i, byte in enumerate(hidden)}
    return [chr(substitutes.get(byte, byte)) for byte in range(256)]
