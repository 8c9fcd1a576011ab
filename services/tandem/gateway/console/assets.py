"""The console's page and all that it loads, read once from the package, with what a browser may do with them; never
asks who wants one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from tandem.gateway.http.exchange import Header

PAGE = "index.html"
_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The page and its scripts come from here and speak to nobody else; what a script makes of data is never markup."""
GUARDS: tuple[Header, ...] = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class Asset:
    """`tag` is its ETag (RFC 9110, 8.8.3), quotes included."""

    content: bytes
    kind: bytes
    tag: bytes

    @property
    def headers(self) -> list[Header]:
        return [(b"etag", self.tag), (b"cache-control", b"no-cache"), *GUARDS]

    def is_known(self, if_none_match: bytes | None) -> bool:
        """The client has this one. Tags are compared weakly, as that header wants it."""
        if if_none_match is None:
            return False
        tags = [tag.strip().removeprefix(b"W/") for tag in if_none_match.split(b",")]
        return self.tag in tags or tags == [b"*"]


def load_assets() -> Mapping[str, Asset]:
    """By name."""
    folder = resources.files("tandem.gateway") / "console"
    found: dict[str, Asset] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            found[file.name] = Asset(content, kind, b'"%s"' % hashlib.sha256(content).hexdigest()[:32].encode())
    return found
