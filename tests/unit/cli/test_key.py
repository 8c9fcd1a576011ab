"""Test that the key that `tandem key` prints is accepted by a tenants file with its hash."""

from __future__ import annotations

import pytest
import yaml

from tandem.cli import main
from tandem.core.addresses import is_loopback
from tandem.gateway.tenants.authenticator import ApiKeyAuthenticator
from tandem.gateway.tenants.tenants_file import parse_tenants


def test_the_key_and_its_hash_belong_together(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for _ in range(2):
        assert main(["key"]) == 0
        found.append(yaml.safe_load(capsys.readouterr().out))
    first, second = found
    assert first["key"] != second["key"] and first["key"].startswith("tdm_") and len(first["key"]) == 4 + 43
    text = f"tenants: {{acme: {{keys: [{{hash: '{first['hash']}'}}]}}}}"
    assert ApiKeyAuthenticator(parse_tenants(text, "f"), lambda: 0).identify({first["key"]}).id == "acme"


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "", "gateway.example")),
    ],
)
def test_loopback_addresses(host: str, is_here: bool) -> None:
    assert is_loopback(host) is is_here
