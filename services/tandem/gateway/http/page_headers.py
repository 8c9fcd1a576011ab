"""Make the headers by which a response forbids the browser whatever the page does not need."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256


def page_headers(inline_style: str = "") -> dict[str, str]:
    """Return the security headers for a page and for its scripts, styles and data.

    The Content Security Policy lets a page load resources only from this server and connect to nothing else, and
    requires Trusted Types, so that scripts cannot insert data as markup. `inline_style`: the text of the only element
    `style` that the page may have; empty: none."""
    digest = b64encode(sha256(inline_style.encode()).digest()).decode()
    styles = f"'self' 'sha256-{digest}'" if inline_style else "'self'"
    policy = (
        f"default-src 'none'; script-src 'self'; style-src {styles}; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )
    return {
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
