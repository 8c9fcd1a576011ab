"""Test that every error kind has a meaning in HTTP, in gRPC and for OpenAI's clients."""

from __future__ import annotations

import grpc
import pytest

from tandem.core.errors import ErrorKind


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_kind_has_statuses_that_exist(kind: ErrorKind) -> None:
    assert 400 <= kind.http < 600
    assert grpc.StatusCode[kind.grpc] is not grpc.StatusCode.OK
    assert kind.openai_type.endswith("_error")


@pytest.mark.parametrize("kind", [k for k in ErrorKind if k.openai_type == "invalid_request_error"])
def test_invalid_requests_are_4xx(kind: ErrorKind) -> None:
    assert kind.http < 500


def test_values_are_unique() -> None:
    assert len({kind.value for kind in ErrorKind}) == len(ErrorKind)
