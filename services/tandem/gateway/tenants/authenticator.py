"""Knows tenants by the keys that clients show; never keeps, logs or repeats a key.

A shown key is hashed and its digest looked up. How long that takes may tell how a digest compares with those that are
stored, but whoever shows keys cannot choose their digests, so that there is nothing to feel one's way along: finding
a key whose SHA-256 begins like a stored one says nothing about the stored one's key. The digest that is found is then
compared in constant time, so that nothing depends on how a mapping compares.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from tandem.admission.api_keys import key_digest
from tandem.admission.tenant import Tenant
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.tenants.tenants_file import Key, Tenants

MAX_KEY_CHARS = 512
"""What is longer is no key, and is not hashed."""
_HOW = "send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'"


class ApiKeyAuthenticator:
    """The Doorkeeper of `auth: keys`. `wall_ns` is the time since the epoch."""

    def __init__(self, tenants: Tenants, wall_ns: Callable[[], int]) -> None:
        self._tenants = tenants
        self._wall_ns = wall_ns
        self._problem: str | None = None

    def identify(self, key: str | None) -> Tenant:
        if not key:
            raise TandemError(ErrorKind.UNAUTHENTICATED, f"an API key is needed: {_HOW}", reason="no_key")
        found = self._find(key)
        if found is None or (found.expires_ns is not None and found.expires_ns <= self._wall_ns()):
            # The same words for a key that never was and one that is no more.
            raise TandemError(ErrorKind.UNAUTHENTICATED, "this API key is not valid", reason="wrong_key")
        return found.tenant

    def _find(self, key: str) -> Key | None:
        if len(key) > MAX_KEY_CHARS:
            return None
        digest = key_digest(key)
        found = self._tenants.keys.get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None

    def problem(self) -> str | None:
        return self._problem

    def update(self, tenants: Tenants) -> None:
        """From now on these; requests that run go on."""
        self._tenants, self._problem = tenants, None

    def keep(self, problem: str) -> None:
        """What should be known now cannot be read; what was known goes on to be."""
        self._problem = problem


def api_key_from_headers(authorization: str | None, x_api_key: str | None) -> str | None:
    """The key in what a client sent: `Bearer <key>` as OpenAI's clients do, or else the bare one of `x-api-key`."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return (x_api_key or "").strip() or None
