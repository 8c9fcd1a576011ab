"""Format API keys and their hashes as text, and parse hashes.

A key is 256 random bits, so its hash needs neither salt nor many rounds: there is no list of likely keys to try, and
stolen hashes do not reveal keys.
"""

from __future__ import annotations

import base64
import hashlib
import re

KEY_PREFIX = "tdm_"
KEY_BYTES = 32
HASH_PREFIX = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


def key_text(secret: bytes) -> str:
    """Format `secret`, KEY_BYTES random bytes, as an API key; raise ValueError for another length."""
    if len(secret) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(secret)}")
    return KEY_PREFIX + base64.urlsafe_b64encode(secret).rstrip(b"=").decode("ascii")


def key_digest(key: str) -> bytes:
    """Return the SHA-256 digest of `key`, which may be any text that a client sends as its API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def hash_text(digest: bytes) -> str:
    return HASH_PREFIX + digest.hex()


def parse_hash(text: str) -> bytes:
    """Parse the hash of an API key, in the form `sha256:<64 hexadecimal digits>`, and return its 32-byte digest.

    Raises ValueError for any other text. The error message does not contain the text, because it may be an API key that
    was given in place of its hash.
    """
    if not _HASH.fullmatch(text):
        raise ValueError("must be sha256: and 64 hexadecimal digits, as `tandem key` prints it")
    return bytes.fromhex(text.removeprefix(HASH_PREFIX))
