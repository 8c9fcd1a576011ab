"""Return the text and the bytes of single tokens, for log probabilities."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenText:
    """Bytes of a token (`raw`), and their `text` as UTF-8 with U+FFFD for bytes that are no character on their own."""

    text: str
    raw: bytes


class Vocabulary:
    """Decode single tokens of both byte notations: GPT-2's byte alphabet, and SentencePiece's `<0xNN>` and U+2581."""

    __slots__ = ("_added", "_alphabet", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token: str(added.content) for token, added in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        byte_level = decoder is not None and b'"ByteLevel"' in bytes(decoder.__getstate__())
        self._alphabet = _byte_alphabet() if byte_level else None

    def token(self, token: int) -> TokenText:
        raw = self._raw(token)
        return TokenText(raw.decode("utf-8", "replace"), raw)

    def _raw(self, token: int) -> bytes:
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


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's character for each byte: the byte itself where printable in Latin-1, else from U+0100 on, in
    order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
