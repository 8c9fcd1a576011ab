"""Convert messages and text to a model's token ids and back, with the tokenizer and template of its bundle."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from tandem.core.bundle import TokenizerBundle
from tandem.core.clock import wall_ns
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.text.chat_template import ChatTemplate, GenerationPrompt
from tandem.gateway.text.detokenizer import Detokenizer, TokenTexts

_CHARS_PER_TOKEN = 4
"""Characters per allowed token up to which a text is encoded without counting first: the usual number in prose, so that
few texts that fit are encoded twice."""
_PIECE_CHARS = 16 << 10
"""Characters of a long text that are counted at a time."""
_CUT_TOKENS = 64
"""Tokens that a piece of a text may have because it was cut out of the text. A cut splits one token, and changes how
the characters around it are merged."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNSERVED_DEFAULTS = {"no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0}
"""Sampling settings of generation configs that no sampler here implements, with the values that switch them off."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """Hold the bytes of one token (`raw`), and these bytes decoded as UTF-8 (`text`), with U+FFFD for bytes that are no
    character on their own."""

    text: str
    raw: bytes


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's character for each byte: the byte itself where printable in Latin-1, else from U+0100 on, in
    order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Hold the sampling values that a model's generation config recommends, for requests that do not set them. None:
    the config recommends no value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def parse(cls, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """Read the values from a generation config; those that are no numbers are left out."""
        numbers: dict[str, float] = {}
        for name in cls.__dataclass_fields__:
            value = generation_config.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[name] = value
        return cls(**numbers)


class Encoded(NamedTuple):
    """Token ids of a text. `offsets`: the index of the character at which each token begins; empty where the caller
    requested no offsets."""

    ids: tuple[int, ...]
    offsets: tuple[int, ...]


class TextTooLong(Exception):
    """Raised for a text that has more tokens than its caller allows. `max_tokens`: how many tokens are allowed."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(f"the text has more than {max_tokens} tokens")
        self.max_tokens = max_tokens


class TextModel:
    """Turn text and conversations of one model into token ids, and token ids into text. Immutable, so that several
    threads may use it at the same time.

    A chat is rendered to one string, which is tokenized as a whole and without the tokenizer's own additions, because
    the template writes them: token ids equal those of transformers' `apply_chat_template`. As with transformers, the
    text of a control token in a user's message becomes that control token.

    The encoding methods raise TextTooLong for a text that clearly has more than `max_tokens` tokens, and take about the
    time of encoding `max_tokens` tokens until then. A text with slightly more tokens may still be encoded. With
    `max_tokens` None, every text is encoded."""

    def __init__(
        self,
        bundle: TokenizerBundle,
        *,
        digest: str = "",
        generation_config: Literal["auto", "none"] = "auto",
        now_ns: Callable[[], int] = wall_ns,
    ) -> None:
        """Load the tokenizer and the template of a bundle. Raises INTERNAL for a bundle that cannot be read.

        `digest`: the bundle's digest, where the caller has computed it already. `generation_config`: "none" ignores the
        sampling values that the model recommends."""
        self.digest = digest or bundle.digest
        self._tokenizer = _tokenizer(bundle.tokenizer_json)
        self._texts = TokenTexts.of(self._tokenizer)
        config = _json_object(bundle.generation_config_json, "generation config")
        self._special_tokens = _json_object(bundle.special_tokens_json, "special tokens")
        self.template = ChatTemplate(bundle.chat_template, _token_strings(self._special_tokens), now_ns=now_ns)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, added_token in added.items() if added_token.special)
        self._added = {token: str(added_token.content) for token, added_token in added.items()}
        decoder = self._tokenizer.decoder
        byte_level = decoder is not None and b'"ByteLevel"' in bytes(decoder.__getstate__())
        self._alphabet = _byte_alphabet() if byte_level else None
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = _token_ids(self._special_tokens.get("eos_token_ids")) | _token_ids(
            config.get("eos_token_id")
        )
        used = config if generation_config == "auto" else {}
        self.defaults = SamplingDefaults.parse(used)
        self.unserved_defaults = tuple(
            name for name, off in _UNSERVED_DEFAULTS.items() if used.get(name) not in (None, off)
        )
        """Names of the generation config's sampling settings that no sampler here implements, so that requests do not
        follow them."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        ending: GenerationPrompt = GenerationPrompt.HEADER,
        add_special_tokens: bool = False,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation. `messages`: with `role` and `content` as strings. `variables`: the
        client's `chat_template_kwargs`. `add_special_tokens`: add the tokenizer's own special tokens to those of the
        template. Raises INVALID_REQUEST as `ChatTemplate.render` does."""
        prompt = self.template.render(messages, variables or {}, ending, tools)
        return self.encode(prompt, add_special_tokens=add_special_tokens, max_tokens=max_tokens).ids

    def encode(
        self, text: str, *, add_special_tokens: bool = True, with_offsets: bool = False, max_tokens: int | None = None
    ) -> Encoded:
        """Return the token ids of a plain prompt, and with `with_offsets` the index in `text` at which each token
        begins. With `add_special_tokens` the ids begin with exactly one BOS where the model requires one, also if the
        text begins with a BOS already."""
        self._check_length(text, max_tokens)
        special = self._special_tokens
        bos = special.get("bos_token_id")
        if not add_special_tokens:
            return self._encode(text, add_special_tokens=False, with_offsets=with_offsets)
        if special.get("add_bos_token") is None and special.get("add_eos_token") is None:
            found = self._encode(text, add_special_tokens=True, with_offsets=with_offsets)
            doubled = bos is not None and found.ids[:2] == (bos, bos)
            return Encoded(found.ids[1:], found.offsets[1:]) if doubled else found
        ids, offsets = self._encode(text, add_special_tokens=False, with_offsets=with_offsets)
        if special.get("add_bos_token") and bos is not None and ids[:1] != (bos,):
            ids, offsets = (bos, *ids), (0, *offsets)
        eos = special.get("eos_token")
        if special.get("add_eos_token") and isinstance(eos, str):
            ending = self._encode(eos, add_special_tokens=False, with_offsets=False).ids
            ids, offsets = (*ids, *ending), (*offsets, *[len(text)] * len(ending))
        return Encoded(ids, offsets)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of a sequence of token ids, with U+FFFD for bytes that are no character."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self,
        stops: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Return a new Detokenizer for one choice; `stops`, `include_stop` and `min_tokens` are its parameters.
        `skip_special_tokens`: special tokens have no text, except those in `shown`."""
        special = self._special - shown if skip_special_tokens else frozenset[int]()
        return Detokenizer(
            self._tokenizer, special, stops, texts=self._texts, include_stop=include_stop, min_tokens=min_tokens
        )

    def knows(self, text: str) -> bool:
        """Return whether the text is one token of the vocabulary."""
        return self._tokenizer.token_to_id(text) is not None

    def special_token(self, text: str) -> int | None:
        """Return the id of the special token with this text; None where there is none."""
        token = self._tokenizer.token_to_id(text)
        return token if token in self._special else None

    def ends_with(self, tokens: Sequence[int], text: str) -> bool:
        """Return whether the text of `tokens`, without blanks at its end, ends with `text`, which may span at most 16
        tokens."""
        return self.decode(tokens[-16:]).rstrip().endswith(text)

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        """Raise TextTooLong where the pieces of a long text have more than `max_tokens` tokens together."""
        if max_tokens is None or len(text) <= _CHARS_PER_TOKEN * max_tokens:
            return
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            [piece] = self._tokenizer.encode_batch_fast([text[start : start + _PIECE_CHARS]], add_special_tokens=False)
            num_tokens += max(0, len(piece) - _CUT_TOKENS)
            if num_tokens > max_tokens:
                raise TextTooLong(max_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool, with_offsets: bool) -> Encoded:
        """Tokenize a batch of one text: unlike `Tokenizer.encode`, this releases the GIL, which a megabyte of text
        would hold for a second.

        Without offsets tokenization is also four times as fast."""
        encode = self._tokenizer.encode_batch if with_offsets else self._tokenizer.encode_batch_fast
        [found] = encode([text], add_special_tokens=add_special_tokens)
        return Encoded(tuple(found.ids), _token_starts(found.offsets, len(text)) if with_offsets else ())

    def token_text(self, token: int) -> TokenText:
        """Return text and bytes of the token with this id; empty for an unknown id.

        Both byte notations of vocabularies are read: GPT-2's byte alphabet, and SentencePiece's `<0xNN>` and U+2581."""
        raw = self._token_bytes(token)
        return TokenText(raw.decode("utf-8", "replace"), raw)

    def token_strings(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each single token."""
        return [self.token_text(token).text for token in tokens]

    def _token_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token) or ""
        if self._alphabet is not None:
            if all(character in self._alphabet for character in piece):
                return bytes(self._alphabet[character] for character in piece)
            return piece.encode()
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()


def _token_starts(spans: Sequence[tuple[int, int]], num_chars: int) -> tuple[int, ...]:
    """Return where tokens begin. Tokens that the tokenizer adds have the span (0, 0), also at the end of the text."""
    starts: list[int] = []
    for start, end in spans:
        added_at_the_end = end == 0 and bool(starts) and starts[-1] > 0
        starts.append(num_chars if added_at_the_end else start)
    return tuple(starts)


def _tokenizer(source: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(source)
    except Exception as error:  # the library raises plain Exception
        raise TandemError(ErrorKind.INTERNAL, f"the tokenizer cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _json_object(source: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(source or "{}")
    except ValueError as error:
        raise TandemError(ErrorKind.INTERNAL, f"the {what} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TandemError(ErrorKind.INTERNAL, f"the {what} are not a JSON object")
    return value


def _token_strings(special: Mapping[str, Any]) -> dict[str, str]:
    """Return names and texts of the special tokens, which tokenizer configurations write as strings or as objects."""
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in special.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _token_ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(token for token in values if isinstance(token, int) and not isinstance(token, bool))
