"""Implement `tandem key`: generate an API key and print it with its hash for the tenants file."""

from __future__ import annotations

import argparse
import secrets

from tandem.admission.api_keys import KEY_BYTES, hash_text, key_digest, key_text
from tandem.core.settings import Resolved


def run(_resolved: Resolved, _args: argparse.Namespace) -> int:
    """Generate an API key and print two lines of YAML: the key, and its hash for the tenants file.

    The key is not stored anywhere. Returns the exit code 0."""
    key = key_text(secrets.token_bytes(KEY_BYTES))
    print(f"key: {key}")  # noqa: T201 - the command's output
    print(f"hash: {hash_text(key_digest(key))}")  # noqa: T201
    return 0
