"""Run schemathesis' valid and invalid requests from /openapi.json against a gateway with an instant backend, and in
`make nightly` against one with workers: every answer is documented in its form, and the only server errors are
a refusal with Retry-After, and the end of the time that the request itself allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given
from schemathesis import APIOperation, Case, CheckContext, GenerationMode, Response
from schemathesis.specs.openapi import checks

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.request import Request
from tests.e2e.gateway.pair import Pair
from tests.effort import effort

Front = Any  # the fixtures' classes live in conftest
pytestmark = pytest.mark.slow
TOKEN = {"type": "integer", "minimum": 0, "maximum": 419}
PROBABLE: dict[str, Any] = {
    "model": {"enum": ["tiny", "many", "none"]},
    "prompt": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": TOKEN, "minItems": 1}]},
    "content": {"type": "string"},
    "role": {"enum": ["system", "developer", "user", "assistant"]},
    "tokens": {"type": "array", "items": TOKEN},
    **{name: {"type": "integer", "minimum": 1, "maximum": 100} for name in ("max_tokens", "max_completion_tokens")},
    **{name: {"type": "null"} for name in ("min_tokens", "stop_token_ids", "logit_bias", "top_logprobs")},
    **{name: {"type": "null"} for name in ("chat_template_kwargs", "tool_calls", "function_call", "audio")},
}
"""Values that this small model can serve, for fields whose random values seldom are: half of the valid requests should
get an answer.
"""
NEEDED = frozenset({"model", "content"})
"""Those of these fields that each valid request has."""
NUM_CASES = 16
"""Number of examples of each operation in each mode."""
REFUSALS = (ErrorKind.QUOTA, ErrorKind.OVERLOADED, ErrorKind.SLO_MISS, ErrorKind.NO_WORKER, ErrorKind.DRAINING)
WITH_BODIES = ["POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize"]
WITHOUT = ["GET /v1/models", "GET /v1/models/{model}", "GET /health", "GET /live", "GET /ready", "GET /metrics",
           "GET /metrics/targets", "GET /metrics/endpoint-picker"]  # fmt: skip
DOCUMENTS = ["GET /openapi.json", "GET /docs"]
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


def no_server_error_but_a_refusal(context: CheckContext, response: Response, case: Case) -> None:
    """Check that a server error is a refusal, or that the time is over that the request itself allowed."""
    if response.status_code == 504:
        assert "x-request-timeout-ms" in {name.lower() for name in case.headers or ()}, response.text
    elif response.status_code >= 500:
        assert response.status_code == 503, response.text
        assert response.headers["retry-after"]


CHECKS: list[Any] = [
    no_server_error_but_a_refusal,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture
def instant_front(front: Front) -> Front:
    """Refuse every seventh request, each time for another reason, and answer the others."""
    front.instant("Paris")
    answering: Callable[[Request], Any] = front.dispatch.script
    numbers = itertools.count()

    def script(request: Request) -> Any:
        number = next(numbers)
        if number % 7 == 6:
            raise TandemError(REFUSALS[number // 7 % len(REFUSALS)], "not now")
        return answering(request)

    front.dispatch.script = script
    return front


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        yield session


def operations(
    url: str,
    session: requests.Session,
    mode: GenerationMode = POSITIVE,
    probable_values: dict[str, Any] = PROBABLE,
    needed: frozenset[str] = NEEDED,
) -> dict[str, APIOperation]:
    """Return the operations that the gateway at `url` documents.

    Valid requests get likely values; invalid ones must violate the document itself, except that the model's name is
    kept, because little else would be reached without it.
    """
    document = session.get(f"{url}/openapi.json", timeout=20).json()
    schemas = document["components"]["schemas"]
    for name in ("ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody", "ChatMessage"):
        fields = schemas[name]["properties"]
        probable = (probable_values.keys() if mode is POSITIVE else {"model"}) & fields.keys()
        may_be_null = "model" in fields and "'null'" in str(fields["model"])
        fields.update({field: probable_values[field] for field in probable})
        if mode is NEGATIVE and may_be_null:
            fields["model"] = {"enum": [*probable_values["model"]["enum"], None]}
        if mode is POSITIVE or not may_be_null:
            schemas[name]["required"] += probable & needed
    if mode is POSITIVE:
        schemas["TokenizeBody"]["properties"] |= {"messages": {"type": "null"}, "prompt": {"type": "string"}}
        schemas["TokenizeBody"]["required"] += ["prompt"]
    loaded = schemathesis.openapi.from_dict(document)
    found = [result.ok() for result in loaded.get_all_operations()]
    return {operation.label: operation for operation in found}


def test_every_operation_is_tried(front: Front, session: requests.Session) -> None:
    assert sorted(operations(front.url, session)) == sorted([*WITH_BODIES, *WITHOUT, *DOCUMENTS])


ALL = [
    *((label, mode) for label in WITH_BODIES for mode in (POSITIVE, NEGATIVE)),
    *((label, POSITIVE) for label in [*WITHOUT, *DOCUMENTS]),
]


def try_operation(
    operation: APIOperation, url: str, session: requests.Session, mode: GenerationMode, num_cases: int
) -> None:
    """Send generated requests of one operation, and check each answer."""
    statuses: set[int] = set()
    required_checks = CHECKS if mode is POSITIVE else [*CHECKS, checks.negative_data_rejection]
    label = operation.label

    @effort(num_cases if "{" in label or label in WITH_BODIES else 1)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        response = case.call(base_url=url, session=session, timeout=60)
        case.validate_response(response, checks=required_checks)
        statuses.add(response.status_code)

    run()
    # Random names are no model's; all else that is right is answered at least once.
    assert mode is NEGATIVE or "{" in label or 200 in statuses


@pytest.mark.parametrize(("label", "mode"), ALL, ids=str)
def test_generated_requests_get_documented_answers(
    instant_front: Front, session: requests.Session, label: str, mode: GenerationMode
) -> None:
    operation = operations(instant_front.url, session, mode)[label]
    try_operation(operation, instant_front.url, session, mode, NUM_CASES)


# ---- with workers

SMALL: dict[str, Any] = {
    **PROBABLE,
    "model": {"enum": ["tiny", "org/alias"]},
    "n": {"enum": [None, 1, 2]},
    "best_of": {"type": "null"},
    **{name: {"type": "integer", "minimum": 1, "maximum": 8} for name in ("max_tokens", "max_completion_tokens")},
}
"""Values that a model on two cores answers soon: it never ends an answer by itself."""
BOUNDED = NEEDED | {"max_tokens", "max_completion_tokens"}
NUM_REAL_CASES = 2


@pytest.mark.nightly
@pytest.mark.parametrize(("label", "mode"), ALL, ids=str)
def test_a_gateway_with_workers_gives_documented_answers(
    pair: Pair, session: requests.Session, label: str, mode: GenerationMode
) -> None:
    url = pair.gateway.url
    try_operation(operations(url, session, mode, SMALL, BOUNDED)[label], url, session, mode, NUM_REAL_CASES)
