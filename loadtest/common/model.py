"""Find the model to be measured and its tokenizer, without loading weights."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from loadtest.client.workloads import Encode
from tandem.runtime.model_store import cache_root, resolve_model


def model_directory(model: str) -> Path:
    """Return the directory of the model, which is downloaded or converted if it is missing. Raises TandemError."""
    return resolve_model(model, cache_root(""))


def encoder(directory: Path) -> Encode:
    """Return a function from text to token ids, which adds no special tokens."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode
