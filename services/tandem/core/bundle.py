"""What turns a model's text into tokens and back, as a worker hands it to gateways; never parses any of it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """The files of a model that its text needs.

    `chat_template` is jinja source, empty when the model has none; the last two are JSON objects.
    `special_tokens_json`: `eos_token_ids` and `bos_token_id`; every special token by its name in transformers
    (`bos_token`, ...); and `add_bos_token` / `add_eos_token`, which are absent or null unless the model's own
    tokenizer configuration sets them, for then the post-processor of tokenizer.json has the word.
    """

    tokenizer_json: bytes
    chat_template: str = ""
    generation_config_json: str = ""
    special_tokens_json: str = ""

    @property
    def digest(self) -> str:
        """BLAKE2b over the four parts, each behind its length in 8 bytes, hexadecimal."""
        state = blake2b(digest_size=16)
        texts = (self.chat_template, self.generation_config_json, self.special_tokens_json)
        for part in (self.tokenizer_json, *(text.encode() for text in texts)):
            state.update(len(part).to_bytes(8, "little") + part)
        return state.hexdigest()

    @property
    def tokenizer_digest(self) -> str:
        """BLAKE2b of what decides which ids a text becomes; part of the model's fingerprint."""
        return blake2b(self.tokenizer_json, digest_size=16).hexdigest()
