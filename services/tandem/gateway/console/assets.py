"""Load the console's page and its scripts, styles and icon from the package."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from tandem.gateway.http.page_headers import page_headers

PAGE = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """Hold one file of the console for HTTP responses. `content`: its bytes. `kind`: its media type. `tag`: its ETag
    (RFC 9110, 8.8.3), including the quotes."""

    content: bytes
    kind: str
    tag: str

    @property
    def headers(self) -> dict[str, str]:
        """Return the HTTP headers of a response with this file, except for `content-type`."""
        return {"etag": self.tag, "cache-control": "no-cache", **page_headers()}

    def is_known(self, if_none_match: str | None) -> bool:
        """Return whether the browser has this version of the file already, so that the response is 304.

        `if_none_match`: the request's header If-None-Match, None where it is absent. It must list `tag`, compared
        weakly (RFC 9110, 13.1.2), or be `*`."""
        if if_none_match is None:
            return False
        tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
        return self.tag in tags or tags == ["*"]


def load_assets() -> Mapping[str, Asset]:
    """Read all assets from the package and return them by file name."""
    folder = resources.files("tandem.gateway") / "console"
    found: dict[str, Asset] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            found[file.name] = Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
