"""Sign calls to a worker and check their signatures; pure, with time and secrets as arguments.

A call carries one binary header: an HMAC-SHA256 (RFC 2104) over the method and the rest of the header, which is a
version, the time of sending, the incarnation of the worker for which the call is meant, a nonce, and the sender's name.
The reply to `Describe` carries a MAC over that nonce and the worker's identity and transport. Message bodies are not
covered: TLS protects against an attacker who can change them.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tandem.core.ids import Incarnation

HEADER = "tandem-auth-bin"
MAX_SKEW_S = 30.0
"""Maximum difference between the time of sending and the receiver's clock: clock skew plus the call's delay."""
NONCE_BYTES = 16
MAX_NONCES = 1 << 17
"""Most nonces that are remembered, about 20 MB: enough for 2,000 calls/s that were sent up to MAX_SKEW_S before or
after now. With more calls, a call is refused as stale at a lower age."""

_VERSION = 1
_MAC_BYTES = 32
_MAX_WHO_BYTES = 128
_HEAD = struct.Struct(f">BQQ{NONCE_BYTES}s")
_MIN_BYTES = _MAC_BYTES + _HEAD.size
_MAX_BYTES = _MIN_BYTES + _MAX_WHO_BYTES
_CALL, _TRANSPORT = b"tandem call\0", b"tandem transport\0"


class AuthFailure(Enum):
    """Name the reasons for which a call is refused.

    The value is text for the log of the worker and is not sent to the caller.
    """

    MISSING = "it carries no signature"
    MALFORMED = "its signature is malformed"
    WRONG = "it is signed with another secret"
    STALE = f"it was signed more than {MAX_SKEW_S:g} s from now: clocks differ, or it was held back"
    OTHER_LIFE = "it was meant for another incarnation of this worker"
    REPLAYED = "it was received before (replay)"


@dataclass(frozen=True, slots=True)
class CallToken:
    """Hold the signed content of a call's header.

    `who`: the sender's name, for logs only, since any holder of the secret can claim any name. `sent_ms`: the time of
    sending, milliseconds since the epoch. `incarnation`: incarnation of the worker for which the call is meant.
    `nonce`: NONCE_BYTES random bytes, different in each call.
    """

    who: str
    sent_ms: int
    incarnation: Incarnation
    nonce: bytes


def sign_token(token: CallToken, method: str, secret: bytes) -> bytes:
    """Return the value of the header HEADER for one call of `method`, which has the form `/package.Service/Method`. The
    value holds `token`, and a MAC over `token` and `method` that is made with `secret`.
    """
    who = token.who.encode(errors="replace")[:_MAX_WHO_BYTES]
    body = _HEAD.pack(_VERSION, token.sent_ms, token.incarnation, token.nonce) + who
    return _call_mac(secret, method, body) + body


def parse_token(header: bytes) -> CallToken | None:
    """Return the content of a header without checking its MAC; None where it is malformed or of another version."""
    if not _MIN_BYTES <= len(header) <= _MAX_BYTES:
        return None
    version, sent_ms, incarnation, nonce = _HEAD.unpack_from(header, _MAC_BYTES)
    if version != _VERSION:
        return None
    return CallToken(header[_MIN_BYTES:].decode(errors="replace"), sent_ms, Incarnation(incarnation), nonce)


def headers_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> list[bytes]:
    """Return the signatures in the gRPC metadata of a call, which are the values of the header HEADER. A valid call has
    exactly one."""
    return [value for key, value in metadata or () if key == HEADER and isinstance(value, bytes)]


def prove(nonce: bytes, transport: bytes, secret: bytes) -> bytes:
    """Return the MAC by which a worker proves to its caller that it knows the cluster's secret.

    `nonce`: nonce of the call. `transport`: the bytes of the reply that the MAC covers.
    """
    return hmac.digest(secret, _TRANSPORT + nonce + transport, "sha256")


def is_proven(proof: bytes, nonce: bytes, transport: bytes, secrets: Sequence[bytes]) -> bool:
    """Return whether `proof` is the MAC that `prove` makes of `nonce` and `transport` with one of `secrets`."""
    return _is_any(proof, [prove(nonce, transport, secret) for secret in secrets])


class CallCheck:
    """Decide whether calls to one incarnation of a worker are accepted.

    Remembers the nonces of the latest `max_nonces` accepted calls, so that a call that somebody has recorded and sends
    again is refused.
    """

    def __init__(self, incarnation: Incarnation, max_nonces: int = MAX_NONCES) -> None:
        self._incarnation = incarnation
        self._nonces = _Nonces(max_nonces)

    def judge(self, headers: Sequence[bytes], method: str, secrets: Sequence[bytes], now: float) -> AuthFailure | None:
        """Return the reason to refuse a call, or None to accept it; the nonce of an accepted call is remembered.

        `headers`: the signature headers of the call (`headers_of`). `method`: the called method as
        `/package.Service/Method`. `secrets`: the cluster's secrets; the call may be signed with any of them. `now`:
        seconds since the epoch.
        """
        if not headers:
            return AuthFailure.MISSING
        token = parse_token(headers[0]) if len(headers) == 1 else None
        if token is None:
            return AuthFailure.MALFORMED
        mac, body = headers[0][:_MAC_BYTES], headers[0][_MAC_BYTES:]
        if not _is_any(mac, [_call_mac(secret, method, body) for secret in secrets]):
            return AuthFailure.WRONG
        if abs(now - token.sent_ms / 1e3) > MAX_SKEW_S:
            return AuthFailure.STALE
        if token.incarnation != self._incarnation:
            return AuthFailure.OTHER_LIFE
        return self._nonces.admit(token, now)


class _Nonces:
    """Set of accepted nonces, grouped by the second of sending so that a whole second can be dropped at once."""

    def __init__(self, limit: int) -> None:
        self.count = 0
        self._limit = limit
        self._by_second: dict[int, set[bytes]] = {}
        self._floor = 0
        """Calls sent before this second are refused, since their nonces are not remembered any more."""

    def admit(self, token: CallToken, now: float) -> AuthFailure | None:
        second = token.sent_ms // 1000
        if second < self._floor:
            return AuthFailure.STALE
        nonces = self._by_second.get(second)
        if nonces is None:
            self._forget(int(now - MAX_SKEW_S))
            nonces = self._by_second[second] = set()
        if token.nonce in nonces:
            return AuthFailure.REPLAYED
        nonces.add(token.nonce)
        self.count += 1
        if self.count > self._limit:
            oldest = min(self._by_second)
            self._floor = oldest + 1
            self._forget(self._floor)
        return None

    def _forget(self, before: int) -> None:
        for second in [second for second in self._by_second if second < before]:
            self.count -= len(self._by_second.pop(second))


def _call_mac(secret: bytes, method: str, body: bytes) -> bytes:
    return hmac.digest(secret, b"".join((_CALL, method.encode(), b"\0", body)), "sha256")


def _is_any(mac: bytes, expected: Sequence[bytes]) -> bool:
    """Compare in constant time, so that the duration does not reveal how many bytes match."""
    return sum(hmac.compare_digest(mac, candidate) for candidate in expected) > 0
