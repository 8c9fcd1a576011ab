"""Test that every error kind has a meaning in HTTP, in gRPC and for OpenAI's clients."""

from __future__ import annotations

import grpc
import pytest

from tandem.core.errors import ERROR_TABLE, ErrorKind, TandemError


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_kind_has_facts_that_exist(kind: ErrorKind) -> None:
    facts = ERROR_TABLE[kind]
    assert 400 <= facts.http < 600
    assert grpc.StatusCode[facts.grpc] is not grpc.StatusCode.OK
    assert facts.openai_type.endswith("_error")
    assert TandemError(kind, "message").facts is facts


@pytest.mark.parametrize("kind", [k for k in ErrorKind if ERROR_TABLE[k].openai_type == "invalid_request_error"])
def test_invalid_requests_are_4xx(kind: ErrorKind) -> None:
    assert ERROR_TABLE[kind].http < 500


def test_values_are_unique() -> None:
    assert len({kind.value for kind in ErrorKind}) == len(ErrorKind)
