"""Test the tenants file, its errors, the authenticator built from it, and files that change under a running gateway."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tandem.admission.api_keys import hash_text, key_digest
from tandem.admission.tenant import Tenant
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane
from tandem.gateway.tenants.authenticator import MAX_KEY_CHARS, ApiKeyAuthenticator, api_keys
from tandem.gateway.tenants.tenants_file import parse_tenants
from tandem.gateway.tenants.tenants_watch import TenantsWatch, read_tenants
from tests.unit.gateway.scripted_worker import until

KEY, OTHER = "tdm_one", "tdm_other"
HASH, OTHER_HASH = hash_text(key_digest(KEY)), hash_text(key_digest(OTHER))
FULL = f"""
defaults: {{requests_per_minute: 60, lane: standard, disaggregation: off}}
tenants:
  acme:
    keys:
      - {{hash: "{HASH}", label: laptop, expires: 2027-01-31}}
    models: [a/b, c]
    tokens_per_minute: 1000
    max_concurrency: 3
    max_prompt_tokens: 500
    lane: batch
    weight: 2.5
    cache_sharing: public
    disaggregation: strict
    operator: true
    proxy: true
  other:
    requests_per_minute: 0
    keys: [{{hash: "{OTHER_HASH}"}}]
"""
SECOND = 10**9
JAN_31_2027 = 1_801_353_600 * SECOND


def tenants_of(keys: str, more: str = "") -> str:
    return f"tenants: {{acme: {{keys: [{keys}]{more}}}}}"


def one(key: str = HASH) -> str:
    return tenants_of(f"{{hash: '{key}'}}")


def test_all_fields_are_read() -> None:
    found = parse_tenants(FULL, "f")
    assert found.tenants["acme"] == Tenant(  # type: ignore[index]
        id="acme",  # type: ignore[arg-type]
        models=frozenset({"a/b", "c"}),
        requests_per_minute=60,
        tokens_per_minute=1000,
        max_concurrency=3,
        max_prompt_tokens=500,
        lane=Lane.BATCH,
        weight=2.5,
        cache_sharing="public",
        disaggregation="strict",
        operator=True,
        proxy=True,
    )
    other = found.tenants["other"]  # type: ignore[index]
    assert (other.requests_per_minute, other.lane, other.disaggregation) == (0, Lane.STANDARD, "off")
    assert not other.operator and not other.proxy
    key = found.keys[key_digest(KEY)]
    assert (key.tenant.id, key.label, key.expires_ns) == ("acme", "laptop", JAN_31_2027)


MERGES = "a: &a0 {x: 1}\n" + "".join(f"b{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
"""A mapping with 9**11 keys."""


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        ("", "f: must be a mapping"),
        ("- a", "f: must be a mapping"),
        ("tenants: {", "f:1: is no YAML"),
        ("tenants:\n  a: {}\n  a: {}", "f:2: is no YAML: a key twice"),
        ('tenants: !!int ""', "f:1: is no YAML: a value does not fit its tag"),
        ("tenants: !!bool 5", "f:1: is no YAML: a value does not fit its tag"),
        ("tenants: !!timestamp x", "f:1: is no YAML: a value does not fit its tag"),
        (MERGES, "is no YAML: a mapping with more than 10,000 keys from merges"),
        ("tenant: {}", "f: 'tenant' is not known"),
        ("tenants: {}", "f: tenants: must be a mapping"),
        ("tenants: {acme: {}}", "f: tenants.acme: must be a mapping"),
        ("tenants: {acme: {weight: 1}}", "f: tenants.acme: 'keys' is missing"),
        ("tenants: {'a b': {keys: []}}", "f: tenants.a b: a tenant's name"),
        ("tenants: {'{x}': {keys: []}}", "a tenant's name"),
        ("tenants: {open: {keys: []}}", "and not open"),
        ("defaults: {keys: []}\ntenants: {a: {keys: []}}", "f: defaults: 'keys' is not known"),
        ("defaults: {operator: true}\ntenants: {a: {keys: []}}", "f: defaults.operator: cannot be a default"),
        ("defaults: {proxy: false}\ntenants: {a: {keys: []}}", "f: defaults.proxy: cannot be a default"),
        (tenants_of("", ", requests_per_minute: -1"), "tenants.acme.requests_per_minute: must be a whole number"),
        (tenants_of("", ", tokens_per_minute: 1e3"), "tenants.acme.tokens_per_minute: must be a whole number"),
        (tenants_of("", ", tokens_per_minute: 1000000001"), "tenants.acme.tokens_per_minute: must be a whole number"),
        (tenants_of("", ", models: all"), "tenants.acme.models: must be a list"),
        (tenants_of("", ", lane: fast"), "tenants.acme.lane: must be one of interactive, standard, batch"),
        (tenants_of("", ", weight: 0"), "tenants.acme.weight: must be more than 0"),
        (tenants_of("", ", weight: .nan"), "tenants.acme.weight: must be"),
        (tenants_of("", ", cache_sharing: yes"), "tenants.acme.cache_sharing: must be text"),
        (tenants_of("", ", operator: 1"), "tenants.acme.operator: must be true or false"),
        (tenants_of("", ", proxy: on-behalf"), "tenants.acme.proxy: must be true or false"),
        (tenants_of("", ", disaggregation: maybe"), "tenants.acme.disaggregation: must be one of"),
        (tenants_of("{}"), "tenants.acme.keys[0]: must be a mapping"),
        (tenants_of("{hash: 12}"), "tenants.acme.keys[0].hash: must be text"),
        (tenants_of(f"{{hash: '{HASH}', expires: soon}}"), "tenants.acme.keys[0].expires"),
        (tenants_of(f"{{hash: '{HASH}', expires: 7}}"), "tenants.acme.keys[0].expires: must be a date"),
        (tenants_of(f"{{hash: '{HASH}'}}, {{hash: '{HASH}'}}"), "tenants.acme.keys[1]: occurs twice"),
        (f"tenants: {{a: {{keys: [{{hash: '{HASH}'}}]}}, b: {{keys: [{{hash: '{HASH}'}}]}}}}", "is also one of a"),
    ],
)
def test_an_invalid_file_is_refused_with_the_location(text: str, expected_message: str) -> None:
    with pytest.raises(TandemError) as refused:
        parse_tenants(text, "f")
    assert refused.value.kind is ErrorKind.INVALID_REQUEST
    assert expected_message in refused.value.message


@pytest.mark.parametrize(
    "text",
    [
        one("tdm_SECRET"),
        tenants_of("tdm_SECRET"),
        tenants_of("{key: tdm_SECRET}"),
        "tenants: {acme: {keys: tdm_SECRET}}",
        "tenants: {acme: {keys: [{hash: 'tdm_SECRET}]}}",
        "tenants: {acme: {keys: [{hash: tdm_SECRET: x}]}}",
    ],
)
def test_a_key_in_the_place_of_its_hash_is_not_repeated(text: str) -> None:
    with pytest.raises(TandemError) as refused:
        parse_tenants(text, "f")
    assert "SECRET" not in refused.value.message


def refusal(authenticator: ApiKeyAuthenticator, *keys: str) -> TandemError:
    with pytest.raises(TandemError) as refused:
        authenticator.identify(set(keys))
    assert refused.value.kind is ErrorKind.UNAUTHENTICATED
    assert not any(key in refused.value.message for key in keys)
    return refused.value


def test_a_key_is_accepted_until_it_expires() -> None:
    now = JAN_31_2027 - 1
    authenticator = ApiKeyAuthenticator(parse_tenants(FULL, "f"), lambda: now)
    assert authenticator.identify({KEY}).id == "acme" and authenticator.identify({OTHER}).id == "other"
    now += 1
    assert refusal(authenticator, KEY).message == refusal(authenticator, "tdm_never").message
    assert authenticator.identify({OTHER}).id == "other"


@pytest.mark.parametrize("key", [HASH, KEY + "x", KEY[:-1], "\ud800", "é" * 9, "x" * (MAX_KEY_CHARS + 1)])
def test_any_other_key_is_refused(key: str) -> None:
    authenticator = ApiKeyAuthenticator(parse_tenants(FULL, "f"), lambda: 0)
    assert refusal(authenticator, key).reason == "wrong_key"
    assert refusal(authenticator).reason == "no_key"
    assert refusal(authenticator, KEY, key).reason == "several_keys"


@pytest.mark.parametrize(
    ("headers", "keys"),
    [
        ([("authorization", "Bearer k")], {"k"}),
        ([("authorization", "bearer  k "), ("x-api-key", "k")], {"k"}),
        ([("authorization", "Bearer k"), ("x-api-key", "other")], {"k", "other"}),
        ([("authorization", "Bearer k"), ("authorization", "Bearer other")], {"k", "other"}),
        ([("x-api-key", " k "), ("x-api-key", "other")], {"k", "other"}),
        ([("authorization", "Basic dTpw"), ("x-api-key", "k")], {"k"}),
        ([("authorization", "Bearer "), ("x-api-key", "k"), ("x-other", "l")], {"k"}),
        ([("authorization", "Bearer"), ("x-api-key", "")], set()),
        ([("authorization", "k")], set()),
        ([], set()),
    ],
)
def test_the_headers_that_carry_keys(headers: list[tuple[str, str]], keys: set[str]) -> None:
    assert api_keys(headers) == keys


class Mounted:
    """Write a file as a mounted Secret does: a link into a directory that another link names, which is swapped."""

    def __init__(self, directory: Path, text: str) -> None:
        self._directory = directory
        self._count = 0
        self.path = directory / "tenants.yaml"
        self.write(text)
        self.path.symlink_to(Path("..data") / "tenants.yaml")

    def write(self, text: str) -> None:
        self._count += 1
        version = self._directory / f"..{self._count}"
        version.mkdir()
        (version / "tenants.yaml").write_text(text)
        fresh = self._directory / "..data_tmp"
        fresh.symlink_to(version.name)
        fresh.rename(self._directory / "..data")


async def test_a_file_that_changes_is_read_again_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mounted = Mounted(tmp_path, FULL)
    authenticator = ApiKeyAuthenticator(read_tenants(mounted.path, "prefer"), lambda: 0)
    watch = TenantsWatch(mounted.path, "prefer", authenticator)
    await watch.poll()
    mounted.write(one(OTHER_HASH))
    assert authenticator.identify({KEY}).id == "acme"
    await watch.poll()
    assert authenticator.identify({OTHER}).id == "acme" and refusal(authenticator, KEY)
    with caplog.at_level(logging.ERROR):
        mounted.write("tenants: {acme: {")
        for _ in range(2):
            await watch.poll()
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and str(mounted.path) in errors[0].getMessage()
    assert authenticator.identify({OTHER}).id == "acme" and "is no YAML" in str(authenticator.problem())
    mounted.path.unlink()
    await watch.poll()
    assert authenticator.identify({OTHER}).id == "acme" and "cannot read" in str(authenticator.problem())
    mounted.path.write_text(one())
    await watch.poll()
    assert authenticator.identify({KEY}).id == "acme" and authenticator.problem() is None


async def test_a_file_of_the_same_size_that_is_written_in_place_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(one())
    authenticator = ApiKeyAuthenticator(read_tenants(path, "off"), lambda: 0)
    watch = TenantsWatch(path, "off", authenticator)
    await watch.poll()
    path.write_text(one(OTHER_HASH))
    os.utime(path, ns=(0, 0))
    await watch.poll()
    assert authenticator.identify({OTHER}).id == "acme"


async def test_the_watch_looks_by_itself_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.gateway.tenants.tenants_watch.POLL_S", 0.01)
    path = tmp_path / "tenants.yaml"
    path.write_text(one())
    authenticator = ApiKeyAuthenticator(read_tenants(path, "off"), lambda: 0)
    watch = TenantsWatch(path, "off", authenticator)
    await watch.start()
    path.write_text(one(OTHER_HASH))
    await until(lambda: key_digest(OTHER) in authenticator._tenants.keys)
    await watch.stop()


def test_a_strict_tenant_is_refused_by_a_gateway_without_disaggregation(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(tenants_of("", ", disaggregation: prefer"))
    assert read_tenants(path, "prefer")
    with pytest.raises(TandemError, match=r"tenants\.acme\.disaggregation"):
        read_tenants(path, "off")
