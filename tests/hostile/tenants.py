"""Fuzz target: the tenants file."""

from __future__ import annotations

from tandem.admission.api_keys import hash_text, key_digest
from tandem.gateway.tenants.tenants_file import parse_tenants
from tests.hostile.surface import Surface

_HASHES = [hash_text(key_digest(name)).encode() for name in ("one", "two")]
_FULL = b"""\
defaults:
  requests_per_minute: 60
tenants:
  acme:
    keys:
      - {hash: "%b", label: laptop, expires: 2027-01-31}
      - {hash: "%b", expires: "2027-01-31T12:00:00+02:00"}
    models: [llama-3.1-8b]
    tokens_per_minute: 100000
    max_concurrency: 4
    lane: batch
    weight: 0.5
    cache_sharing: public
    disaggregation: off
    operator: true
"""


def _read(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:  # the reader of the file refuses it before
        return
    parse_tenants(text, "tenants.yaml")


_MERGES = b"".join(b"b%d: &a%d {<<: [%b]}\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12))
SURFACES = {
    "tenants": Surface(
        read=_read,
        seeds=(_FULL % tuple(_HASHES), b"tenants:\n  a: {keys: []}\n"),
        found=(
            b'tenants: !!int ""',
            b"tenants: !!bool x",
            b"tenants: !!timestamp x",
            b"a: &a0 {x: 1}\n" + _MERGES,  # 9**11 keys
        ),
    )
}
