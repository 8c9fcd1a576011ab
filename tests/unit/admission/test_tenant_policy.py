"""Test a tenant's limits on one request: its longest prompt, its lanes, and its cache salt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.admission.api_keys import hash_text, key_digest, key_text, parse_hash
from tandem.admission.tenant import OPEN, Tenant, apply_tenant_policy, cache_salt
from tandem.core.config import Disaggregation
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane
from tandem.core.request import Request, SamplingParams

ACME = Tenant(id=TenantId("acme"))
SHARING = replace(ACME, cache_sharing="public")
REQUEST = Request(
    id=RequestId("r"), model="m", prompt_tokens=tuple(range(10)), sampling=SamplingParams(max_tokens=1)
)  # fmt: skip
IDS = st.text(st.sampled_from("ab1. -_"), min_size=1, max_size=4)


def refusal(request: Request, tenant: Tenant) -> TandemError:
    with pytest.raises(TandemError) as refused:
        apply_tenant_policy(request, tenant)
    return refused.value


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers() -> None:
    assert apply_tenant_policy(REQUEST, replace(ACME, max_prompt_tokens=10))
    error = refusal(REQUEST, replace(ACME, max_prompt_tokens=9))
    assert error.kind.http == 400 and "at most 9" in error.message and "has 10" in error.message


def test_a_more_urgent_lane_is_lowered_to_the_tenants() -> None:
    standard = replace(ACME, lane=Lane.STANDARD)
    lanes = [apply_tenant_policy(replace(REQUEST, lane=lane), standard).lane for lane in Lane]
    assert lanes == [Lane.STANDARD, Lane.STANDARD, Lane.BATCH]


def test_forbidden_models_are_not_found() -> None:
    assert ACME.may_use("m") and not replace(ACME, models=frozenset()).may_use("m")
    some = replace(ACME, models=frozenset({"m"}))
    assert some.may_use("m") and some.may_use("other", "m") and not some.may_use("other")


def test_the_open_tenant_shares_one_cache() -> None:
    assert apply_tenant_policy(REQUEST, OPEN).cache_salt == ""
    assert apply_tenant_policy(REQUEST, SHARING).cache_salt == ""


def test_a_request_runs_as_its_tenant() -> None:
    run = apply_tenant_policy(REQUEST, ACME)
    assert run.tenant == "acme" and run.cache_salt not in ("", "acme")
    assert replace(run, tenant=REQUEST.tenant, cache_salt="") == REQUEST


@given(IDS, IDS, st.booleans(), st.booleans(), st.text(max_size=6), st.text(max_size=6))
def test_salts_are_equal_for_the_same_owner_and_choice_only(
    one: str, other: str, one_shares: bool, other_shares: bool, chosen: str, rechosen: str
) -> None:
    def tenant(name: str, shares: bool) -> Tenant:
        return Tenant(id=TenantId(name), cache_sharing="public" if shares else "private")

    owners = [("" if shares else name) for name, shares in ((one, one_shares), (other, other_shares))]
    is_same = (owners[0], chosen) == (owners[1], rechosen)
    assert (cache_salt(tenant(one, one_shares), chosen) == cache_salt(tenant(other, other_shares), rechosen)) is is_same


def test_a_client_cannot_choose_another_salt() -> None:
    mine = cache_salt(ACME)
    for attacker in (Tenant(id=TenantId("eve")), Tenant(id=TenantId("eve"), cache_sharing="public"), OPEN):
        for chosen in (mine, "tenant acme", "11 tenant acme ", "acme"):
            assert cache_salt(attacker, chosen) != mine


def test_a_key_is_as_long_as_it_must_be_and_its_hash_reads_back() -> None:
    key = key_text(bytes(range(32)))
    assert key == "tdm_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    assert parse_hash(hash_text(key_digest(key))) == key_digest(key)
    with pytest.raises(ValueError, match="32 bytes"):
        key_text(b"short")
    with pytest.raises(ValueError) as refused:
        parse_hash(key)
    assert key not in str(refused.value)


def test_the_limit_may_be_one_token() -> None:
    assert "at most 1" in refusal(REQUEST, replace(ACME, max_prompt_tokens=1)).message


_MODES = ("off", "auto", "prefer", "strict")


@pytest.mark.parametrize("of_gateway", _MODES)
@pytest.mark.parametrize("own", [None, *_MODES])
def test_a_request_may_choose_where_the_operator_has_not_decided(
    own: Disaggregation | None, of_gateway: Disaggregation
) -> None:
    acme, policy = replace(ACME, disaggregation=own), own or of_gateway
    assert acme.choosing(None, of_gateway) == acme.choosing(policy, of_gateway) == acme
    for requested in set(_MODES) - {policy}:
        if policy in ("auto", "prefer"):
            assert acme.choosing(requested, of_gateway) == replace(acme, disaggregation=requested)
        else:
            with pytest.raises(TandemError, match=f"={requested} is not allowed.* is {policy}") as refused:
                acme.choosing(requested, of_gateway)
            assert (refused.value.kind, refused.value.param) == (ErrorKind.INVALID_REQUEST, "disaggregation")
