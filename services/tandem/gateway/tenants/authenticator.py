"""Identify tenants by the API keys that clients send. Keys are neither stored nor logged.

A key is hashed and its SHA-256 digest looked up. The duration of the lookup may reveal how a digest compares with the
stored ones, but a client cannot choose its digests, so it learns nothing: a key whose digest begins like a stored one
reveals nothing about the stored key. The digest that is found is then compared in constant time, so that nothing
depends on how a mapping compares."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from tandem.admission.api_keys import key_digest
from tandem.admission.tenant import Tenant
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import TenantId
from tandem.gateway.context.interfaces import Authenticator
from tandem.gateway.context.request_context import FAIRNESS_HEADERS
from tandem.gateway.tenants.tenants_file import Key, Tenants

MAX_KEY_CHARS = 512
"""Largest number of characters of a key; longer values are rejected without hashing them."""
_HOW = "as 'Authorization: Bearer <key>' or 'x-api-key: <key>'"


class ApiKeyAuthenticator:
    """Find the tenant of an API key among those of a tenants file (`gateway.auth: keys`).

    `wall_ns` returns nanoseconds since the epoch, by which keys expire."""

    def __init__(self, tenants: Tenants, wall_ns: Callable[[], int]) -> None:
        self._tenants = tenants
        self._wall_ns = wall_ns
        self._problem: str | None = None

    def identify(self, keys: AbstractSet[str]) -> Tenant:
        if not keys:
            raise TandemError(ErrorKind.UNAUTHENTICATED, f"an API key is required: send it {_HOW}", reason="no_key")
        if len(keys) > 1:
            message = f"the request's headers have {len(keys)} different API keys: send one, {_HOW}"
            raise TandemError(ErrorKind.UNAUTHENTICATED, message, reason="several_keys")
        (key,) = keys
        found = self._find(key)
        if found is None or (found.expires_ns is not None and found.expires_ns <= self._wall_ns()):
            # The same message for unknown and for expired keys.
            raise TandemError(
                ErrorKind.UNAUTHENTICATED,
                "this API key is unknown or expired; ask the operator of this server for another",
                reason="wrong_key",
            )
        return found.tenant

    def find(self, name: str) -> Tenant | None:
        return self._tenants.tenants.get(TenantId(name))

    def _find(self, key: str) -> Key | None:
        if len(key) > MAX_KEY_CHARS:
            return None
        digest = key_digest(key)
        found = self._tenants.keys.get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None

    def problem(self) -> str | None:
        return self._problem

    def update(self, tenants: Tenants) -> None:
        """Identify clients by these tenants from now on, and clear the problem of the previous file. Running requests
        are not affected."""
        self._tenants = tenants
        self._problem = None

    def keep_after(self, problem: str) -> None:
        """Keep the current tenants because the tenants file cannot be read; `problem` describes why, and is returned by
        `problem()` until the next `update`."""
        self._problem = problem


def tenant_of(headers: Sequence[tuple[str, str]], authenticator: Authenticator) -> Tenant:
    """Return the tenant of a request with these `headers`: lower-case names and values, where a name may be repeated.

    That is the tenant that owns the API key in the headers. Where this tenant is a proxy and a header of
    FAIRNESS_HEADERS names another tenant, the request belongs to the named tenant; from other tenants these headers are
    ignored. Raises TandemError(UNAUTHENTICATED) as `Authenticator.identify` does, and TandemError(INVALID_REQUEST)
    where a proxy names a tenant that does not exist, or two different ones, of which the proxy's client may have
    written one."""
    caller = authenticator.identify(api_keys(headers))
    if not caller.proxy:
        return caller
    named = {value.strip(): name for name, value in headers if name in FAIRNESS_HEADERS}
    if not named:
        return caller
    name, header = next(iter(named.items()))
    if len(named) > 1:
        message = f"{' and '.join(FAIRNESS_HEADERS)} must name the same tenant wherever they occur"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param=header)
    tenant = authenticator.find(name)
    if tenant is None:
        message = f"{header} must be the name of a tenant of this server"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param=header)
    return tenant


def api_keys(headers: Sequence[tuple[str, str]]) -> frozenset[str]:
    """Return the different API keys that a client sent, in `authorization` (`Bearer <key>`) and in `x-api-key`; headers
    with another scheme or without a key count as absent. `headers`: lower-case names and values."""
    found: set[str] = set()
    for name, value in headers:
        key = value
        if name == "authorization":
            scheme, _, key = value.strip().partition(" ")
            if scheme.lower() != "bearer":
                continue
        elif name != "x-api-key":
            continue
        found.add(key.strip())
    return frozenset(found - {""})
