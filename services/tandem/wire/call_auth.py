"""What a call to a worker says to be believed, and whether it is; never reads time, a file or a call.

A call carries one binary header: HMAC-SHA256 (RFC 2104) over the method and over all that follows it in the header,
which is a version, when it was sent, the incarnation that it is meant for, a nonce, and who sends it. The answer to
`Describe` carries a MAC over that nonce and over what the worker says of its transport. Bodies are not covered: who
can change what is on the wire is kept out by TLS.
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
"""How far a sender's clock and the delay of a call may be off."""
NONCE_BYTES = 16
MAX_NONCES = 1 << 17
"""Remembered at once: 2,000 calls/s for the whole window, some 20 MB. With more the window gets shorter."""

_VERSION = 1
_MAC_BYTES = 32
_MAX_WHO_BYTES = 128
_HEAD = struct.Struct(f">BQQ{NONCE_BYTES}s")
_MIN_BYTES = _MAC_BYTES + _HEAD.size
_MAX_BYTES = _MIN_BYTES + _MAX_WHO_BYTES
_CALL, _TRANSPORT = b"tandem call\0", b"tandem transport\0"


class AuthFailure(Enum):
    """Why a call is not believed; the value is for this program's own log."""

    MISSING = "it carries no signature"
    MALFORMED = "its signature is malformed"
    WRONG = "it is signed with another secret"
    STALE = f"it was signed more than {MAX_SKEW_S:g} s from now: clocks differ, or it was held back"
    OTHER_LIFE = "it was meant for another life of this worker"
    REPLAYED = "it has come before"


@dataclass(frozen=True, slots=True)
class CallToken:
    """`sent_ms`: milliseconds since the epoch. `who` is told to logs only: whoever has the secret may be anybody."""

    who: str
    sent_ms: int
    incarnation: Incarnation
    nonce: bytes


def sign_token(stamp: CallToken, method: str, secret: bytes) -> bytes:
    """The header of a call of `method`, as `/package.Service/Method`."""
    who = stamp.who.encode(errors="replace")[:_MAX_WHO_BYTES]
    body = _HEAD.pack(_VERSION, stamp.sent_ms, stamp.incarnation, stamp.nonce) + who
    return _call_mac(secret, method, body) + body


def parse_token(header: bytes) -> CallToken | None:
    """What a header says, believed or not; None when it is malformed or of another version."""
    if not _MIN_BYTES <= len(header) <= _MAX_BYTES:
        return None
    version, sent_ms, incarnation, nonce = _HEAD.unpack_from(header, _MAC_BYTES)
    if version != _VERSION:
        return None
    return CallToken(header[_MIN_BYTES:].decode(errors="replace"), sent_ms, Incarnation(incarnation), nonce)


def headers_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> list[bytes]:
    """All signatures of a call; it should have one."""
    return [value for key, value in metadata or () if key == HEADER and isinstance(value, bytes)]


def prove(nonce: bytes, transport: bytes, secret: bytes) -> bytes:
    """What only who knows the secret can say of a transport to the caller that drew the nonce."""
    return hmac.digest(secret, _TRANSPORT + nonce + transport, "sha256")


def is_proven(proof: bytes, nonce: bytes, transport: bytes, secrets: Sequence[bytes]) -> bool:
    return _is_any(proof, [prove(nonce, transport, secret) for secret in secrets])


class CallCheck:
    """Judges the calls to one life of a worker and remembers those that it believed, so that none is believed twice."""

    def __init__(self, incarnation: Incarnation, max_nonces: int = MAX_NONCES) -> None:
        self._incarnation = incarnation
        self._nonces = _Nonces(max_nonces)

    def __repr__(self) -> str:
        return f"<check of calls to incarnation {self._incarnation}, {self._nonces.count} remembered>"

    def judge(self, headers: Sequence[bytes], method: str, secrets: Sequence[bytes], now: float) -> AuthFailure | None:
        """None: the call is believed. `now` is in seconds since the epoch."""
        if not headers:
            return AuthFailure.MISSING
        stamp = parse_token(headers[0]) if len(headers) == 1 else None
        if stamp is None:
            return AuthFailure.MALFORMED
        mac, body = headers[0][:_MAC_BYTES], headers[0][_MAC_BYTES:]
        if not _is_any(mac, [_call_mac(secret, method, body) for secret in secrets]):
            return AuthFailure.WRONG
        if abs(now - stamp.sent_ms / 1e3) > MAX_SKEW_S:
            return AuthFailure.STALE
        if stamp.incarnation != self._incarnation:
            return AuthFailure.OTHER_LIFE
        return self._nonces.admit(stamp, now)


class _Nonces:
    """By the second in which they were sent, so that a whole second is forgotten at once."""

    def __init__(self, limit: int) -> None:
        self.count = 0
        self._limit = limit
        self._by_second: dict[int, set[bytes]] = {}
        self._floor = 0
        """What was sent before this second is not told from a replay any more."""

    def admit(self, stamp: CallToken, now: float) -> AuthFailure | None:
        second = stamp.sent_ms // 1000
        if second < self._floor:
            return AuthFailure.STALE
        nonces = self._by_second.get(second)
        if nonces is None:
            self._forget(int(now - MAX_SKEW_S))
            nonces = self._by_second[second] = set()
        if stamp.nonce in nonces:
            return AuthFailure.REPLAYED
        nonces.add(stamp.nonce)
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


def _is_any(mac: bytes, wanted: Sequence[bytes]) -> bool:
    """In a time that does not tell how much of it is right."""
    return sum(hmac.compare_digest(mac, one) for one in wanted) > 0
