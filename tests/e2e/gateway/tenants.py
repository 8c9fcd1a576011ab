"""Make files of tenants for gateways that require keys."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.admission.api_keys import hash_text, key_digest

UNLIMITED = "requests_per_minute: 1000000, tokens_per_minute: 1000000000, max_concurrency: 100000, "


def key_of(tenant: str) -> str:
    return f"tdm_{tenant}"


def tenants_file(terms: Mapping[str, str]) -> str:
    """Return the file of tenants with a key each. `terms`: their other fields in YAML, a comma after each field."""
    lines = ["tenants:"]
    for name, fields in terms.items():
        lines.append(f"  {name}: {{{fields}keys: [{{hash: '{hash_text(key_digest(key_of(name)))}'}}]}}")
    return "\n".join(lines)
