"""Test call signatures: valid ones are accepted once, and all other bytes are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import Incarnation
from tandem.wire.call_auth import (
    HEADER,
    MAX_SKEW_S,
    NONCE_BYTES,
    AuthFailure,
    CallCheck,
    CallToken,
    headers_of,
    is_proven,
    parse_token,
    prove,
    sign_token,
)

SECRET, OTHER = b"s" * 32, b"o" * 32
SUBMIT, DRAIN = "/tandem.v1.Worker/Submit", "/tandem.v1.Worker/Drain"
LIFE = Incarnation(1_795_000_000_000_000_001)
NOW = 1_795_000_000.5
STAMP = CallToken("gateway-1", int(NOW * 1e3), LIFE, b"n" * NONCE_BYTES)


def judge(
    check: CallCheck, header: bytes, method: str = SUBMIT, *, secrets: tuple[bytes, ...] = (SECRET,), now: float = NOW
) -> AuthFailure | None:
    return check.judge([header], method, secrets, now)


def nonce(number: int) -> bytes:
    return number.to_bytes(NONCE_BYTES, "big")


def test_a_call_is_accepted_once() -> None:
    check = CallCheck(LIFE)
    header = sign_token(STAMP, SUBMIT, SECRET)
    assert judge(check, header) is None
    assert judge(check, header) is AuthFailure.REPLAYED
    assert judge(check, sign_token(replace(STAMP, nonce=nonce(1)), SUBMIT, SECRET)) is None


@pytest.mark.parametrize("secrets", [(SECRET, OTHER), (OTHER, SECRET)])
def test_either_secret_of_a_rotation_is_accepted(secrets: tuple[bytes, ...]) -> None:
    assert judge(CallCheck(LIFE), sign_token(STAMP, SUBMIT, SECRET), secrets=secrets) is None


@pytest.mark.parametrize(
    ("header", "method", "fault"),
    [
        (sign_token(STAMP, SUBMIT, OTHER), SUBMIT, AuthFailure.WRONG),
        (sign_token(STAMP, SUBMIT, SECRET), DRAIN, AuthFailure.WRONG),
        (sign_token(replace(STAMP, incarnation=Incarnation(LIFE + 1)), SUBMIT, SECRET), SUBMIT, AuthFailure.OTHER_LIFE),
        (sign_token(replace(STAMP, sent_ms=0), SUBMIT, SECRET), SUBMIT, AuthFailure.STALE),
        (sign_token(replace(STAMP, sent_ms=2**64 - 1), SUBMIT, SECRET), SUBMIT, AuthFailure.STALE),
        (b"", SUBMIT, AuthFailure.MALFORMED),
        (sign_token(STAMP, SUBMIT, SECRET)[:40], SUBMIT, AuthFailure.MALFORMED),
        (sign_token(STAMP, SUBMIT, SECRET) + bytes(1 << 16), SUBMIT, AuthFailure.MALFORMED),
    ],
)
def test_other_signatures_are_refused(header: bytes, method: str, fault: AuthFailure) -> None:
    assert judge(CallCheck(LIFE), header, method) is fault


def test_a_call_carries_one_signature() -> None:
    check, header = CallCheck(LIFE), sign_token(STAMP, SUBMIT, SECRET)
    assert check.judge([], SUBMIT, [SECRET], NOW) is AuthFailure.MISSING
    assert check.judge([header, header], SUBMIT, [SECRET], NOW) is AuthFailure.MALFORMED
    assert headers_of([("user-agent", "x"), (HEADER, header), (HEADER, "text")]) == [header]
    assert headers_of(None) == []


@pytest.mark.parametrize("off_s", [-1.0, 1.0])
def test_clock_skew_up_to_the_limit_is_accepted(off_s: float) -> None:
    header = sign_token(STAMP, SUBMIT, SECRET)
    assert judge(CallCheck(LIFE), header, now=NOW + off_s * (MAX_SKEW_S - 0.1)) is None
    assert judge(CallCheck(LIFE), header, now=NOW + off_s * (MAX_SKEW_S + 0.1)) is AuthFailure.STALE


@given(flip=st.integers(0, 8 * len(sign_token(STAMP, SUBMIT, SECRET)) - 1))
def test_a_header_with_any_bit_changed_is_refused(flip: int) -> None:
    header = bytearray(sign_token(STAMP, SUBMIT, SECRET))
    header[flip // 8] ^= 1 << flip % 8
    assert judge(CallCheck(LIFE), bytes(header)) in (AuthFailure.WRONG, AuthFailure.MALFORMED)


@given(header=st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_without_another_error(header: bytes) -> None:
    assert judge(CallCheck(LIFE), header) in (AuthFailure.WRONG, AuthFailure.MALFORMED)


@given(who=st.text(st.characters(), max_size=300))
def test_any_sender_name_is_carried_and_truncated_to_its_limit(who: str) -> None:
    header = sign_token(replace(STAMP, who=who), SUBMIT, SECRET)
    assert judge(CallCheck(LIFE), header) is None
    stamp = parse_token(header)
    assert stamp is not None and stamp.who.startswith(who.encode(errors="replace")[:100].decode(errors="ignore"))


Moves = st.lists(st.tuples(st.floats(-25, 40), st.integers(0, 12)), min_size=1, max_size=80)


@given(moves=Moves, limit=st.integers(1, 6))
def test_no_call_is_accepted_twice_at_any_nonce_limit(moves: list[tuple[float, int]], limit: int) -> None:
    """Send calls early, late and repeatedly while time passes, and more calls than the nonce limit."""
    check, now, sent = CallCheck(LIFE, max_nonces=limit), NOW, dict[int, bytes]()
    believed: set[bytes] = set()
    for step_s, number in moves:
        now += max(0.0, step_s) / 4
        stamp = replace(STAMP, sent_ms=int((now + step_s) * 1e3), nonce=nonce(number))
        header = sent.setdefault(number, sign_token(stamp, SUBMIT, SECRET))
        if judge(check, header, now=now) is None:
            assert header not in believed
            believed.add(header)
        assert check._nonces.count == sum(map(len, check._nonces._by_second.values())) <= limit


def test_nonces_are_dropped_when_their_window_is_over() -> None:
    check = CallCheck(LIFE)
    for second in range(1000):
        stamp = replace(STAMP, sent_ms=int((NOW + second) * 1e3), nonce=nonce(second))
        assert judge(check, sign_token(stamp, SUBMIT, SECRET), now=NOW + second) is None
    assert check._nonces.count <= MAX_SKEW_S + 2


def test_beyond_the_nonce_limit_the_window_is_shorter_but_not_open() -> None:
    check = CallCheck(LIFE, max_nonces=2)
    headers = [
        sign_token(replace(STAMP, sent_ms=int((NOW + i) * 1e3), nonce=nonce(i)), SUBMIT, SECRET) for i in (0, 1, 2, 3)
    ]
    assert [judge(check, header) for header in headers] == [None] * 4
    assert judge(check, headers[0]) is AuthFailure.STALE
    assert judge(check, headers[3]) is AuthFailure.REPLAYED
    late = sign_token(replace(STAMP, nonce=nonce(9)), SUBMIT, SECRET)
    assert judge(check, late) is AuthFailure.STALE


def test_a_proof_is_of_one_nonce_and_one_transport() -> None:
    proof = prove(STAMP.nonce, b"transport", SECRET)
    assert is_proven(proof, STAMP.nonce, b"transport", [OTHER, SECRET])
    assert not is_proven(proof, nonce(1), b"transport", [SECRET])
    assert not is_proven(proof, STAMP.nonce, b"transporT", [SECRET])
    assert not is_proven(proof, STAMP.nonce, b"transport", [OTHER])
    assert not is_proven(b"", STAMP.nonce, b"transport", [SECRET])
    assert not is_proven(sign_token(STAMP, SUBMIT, SECRET)[:32], STAMP.nonce, b"transport", [SECRET])
