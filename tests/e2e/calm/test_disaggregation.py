"""Test that a request chooses whether it is disaggregated, where the gateway's policy allows that."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.gateway.http import completion
from tests.e2e.gateway.pair import Pair

_LENGTH = 60


@pytest.mark.parametrize(
    ("header", "field", "path"),
    [(None, None, "remote"), ("off", None, "local"), (None, "off", "local"), ("strict", "off", "remote")],
)
def test_a_request_chooses(calm: Pair, http: httpx.Client, header: str | None, field: str | None, path: str) -> None:
    body = completion(_LENGTH, 5_400_000, 6) | ({} if field is None else {"disaggregation": field})
    headers = {} if header is None else {"x-tandem-disaggregation": header}
    answer = http.post(f"{calm.gateway.url}/v1/completions", json=body, headers=headers).raise_for_status()
    assert answer.headers["x-tandem-path"] == path
    with_default = calm.complete(_LENGTH, 5_400_000, 6)
    assert answer.json()["choices"][0]["text"] == with_default.text()


def test_a_policy_of_off_allows_no_other(calm: Pair, http: httpx.Client) -> None:
    body = completion(_LENGTH, 5_400_001, 6)
    answer = http.post(f"{calm.whole.url}/v1/completions", json=body, headers={"x-tandem-disaggregation": "auto"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "disaggregation")
    assert "the policy of this tenant is off" in answer.json()["error"]["message"]
