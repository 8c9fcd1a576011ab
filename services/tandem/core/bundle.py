"""Hold the tokenizer and chat files of a model, which workers serve to gateways; does not parse their contents."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """The files of a model that convert between text and token ids; workers send them to gateways.

    `chat_template` is jinja source, empty when the model has none; `generation_config_json` and `special_tokens_json`
    are JSON objects. `special_tokens_json` has these keys:
    - `eos_token_ids` and `bos_token_id`;
    - for each special token its name in transformers (`bos_token`, ...), with the text of the token as value;
    - `add_bos_token` and `add_eos_token`, which are absent or null unless the model's own tokenizer configuration sets
      them: where absent, the post-processor of tokenizer.json decides.
    """

    tokenizer_json: bytes
    chat_template: str = ""
    generation_config_json: str = ""
    special_tokens_json: str = ""

    @property
    def digest(self) -> str:
        """Return the hexadecimal BLAKE2b digest over all four fields, which identifies the bundle."""
        state = blake2b(digest_size=16)
        texts = (self.chat_template, self.generation_config_json, self.special_tokens_json)
        for part in (self.tokenizer_json, *(text.encode() for text in texts)):
            state.update(len(part).to_bytes(8, "little") + part)
        return state.hexdigest()

    @property
    def tokenizer_digest(self) -> str:
        """Return the hexadecimal BLAKE2b digest of `tokenizer_json` alone, which is part of the model's fingerprint."""
        return blake2b(self.tokenizer_json, digest_size=16).hexdigest()
