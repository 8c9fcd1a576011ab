"""Read the caller and the metadata of one gRPC call, and send its initial metadata, messages, trailers and errors."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.request_context import label_of
from tandem.gateway.http.exchange import error_headers, header_value, refusal
from tandem.gateway.serving.completions import CompletionStream
from tandem.wire.gen import inference_pb2 as pb

MAX_MESSAGE, MAX_PATH = 1000, 200
"""Largest number of bytes of an error's message (MAX_MESSAGE) and of the path of the field at fault (MAX_PATH). They
keep the metadata of an error below 8 KiB, beyond which clients refuse it at random: a byte of the message takes up to
three as `grpc-message`, and the details repeat message and path."""
MAX_REASONS = 6000
"""Largest number of characters of `x-tandem-reasons`, which keeps the initial metadata of a reply below 8 KiB too; the
reasons of one prompt have some 600."""
DETAIL_TYPE = "type.googleapis.com/tandem.v1.ErrorDetail"


class GrpcCall:
    """Read the metadata of one gRPC call, and send its initial metadata, its messages and its status.

    `entries`: name and value of each metadata entry in order, without binary values. `metadata`: the values by name,
    the first value of a repeated name. `request_id`: the client's `x-request-id`, or a new random id, as over HTTP.
    """

    __slots__ = ("_context", "_opened", "entries", "metadata", "request_id")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._opened = False
        given = context.invocation_metadata() or ()
        self.entries = [(name, value) for name, value in given if isinstance(value, str)]
        self.metadata = dict(reversed(self.entries))
        self.request_id = label_of(self.metadata.get("x-request-id"))

    async def write(self, reply: Message, stalled_client_s: float) -> None:
        """Send one message of a stream; return when gRPC has accepted it.

        Raises CANCELLED when the client reads nothing for `stalled_client_s` seconds, so that the request ends; gRPC
        then keeps the call's status in its send buffer, behind the unread messages.
        """
        try:
            async with asyncio.timeout(stalled_client_s):
                await self._context.write(reply)
        except TimeoutError:
            message = f"the client read nothing of the stream for {stalled_client_s:g} s"
            raise TandemError(ErrorKind.CANCELLED, message, reason="stalled_client") from None

    async def open(self, answer: CompletionStream) -> None:
        """Send the initial metadata, with the path, the router's reasons and the rate limits of `answer`; a second call
        does nothing. Call this once the first part of the output was read, because `answer.path` is final only then. Of
        many prompts only the first ones have their reasons there."""
        if self._opened:
            return
        self._opened = True
        metadata = {"x-request-id": self.request_id, "x-tandem-path": header_value(answer.path)}
        if answer.reasons is not None:
            metadata["x-tandem-reasons"] = _reasons(answer.reasons)
        metadata |= answer.rate_limits
        await self._context.send_initial_metadata(tuple(metadata.items()))

    async def abort(self, error: TandemError) -> None:
        """End the call with the status of an error and an ErrorDetail. Never returns: raises AbortError, by which gRPC
        ends a handler, or CancelledError where the client has disconnected."""
        code = grpc.StatusCode[error.kind.grpc]
        message = _cut(error.message, MAX_MESSAGE)
        try:
            await self._context.abort(code, message, _trailers(error, code, message, self.request_id))
        except grpc.aio.AbortError:
            raise
        except Exception:
            if not self._context.done():
                raise
            # The client disconnected before it received the status.
            raise asyncio.CancelledError from None


def _reasons(of_prompts: Sequence[dict[str, object]]) -> str:
    """Return the reasons of the first prompts, as many as fit into MAX_REASONS characters, as a JSON array."""
    texts = [json.dumps(reasons) for reasons in of_prompts]
    ends = accumulate(len(text) + 2 for text in texts)  # each with a comma and a blank, or with the brackets
    num_fitting = sum(end <= MAX_REASONS for end in ends)
    return f"[{', '.join(texts[:num_fitting])}]"


def _cut(text: str, num_bytes: int) -> str:
    """Return the first characters of a text that fit into `num_bytes` of UTF-8."""
    return text.encode("utf-8", "replace")[:num_bytes].decode("utf-8", "ignore")


def _trailers(
    error: TandemError, code: grpc.StatusCode, message: str, request_id: str
) -> tuple[tuple[str, str | bytes], ...]:
    retry_after_s, reject_reason = refusal(error)
    detail = pb.ErrorDetail(
        kind=error.kind.value,
        param=None if error.param is None else _cut(error.param, MAX_PATH),
        retry_after_s=retry_after_s,
        reason=reject_reason or error.reason,
        type=error.kind.openai_type,
    ).SerializeToString()
    status = pb.RichStatus(code=code.value[0], message=message)
    status.details.add(type_url=DETAIL_TYPE, value=detail)
    trailers: list[tuple[str, str | bytes]] = [
        ("x-request-id", request_id),
        ("tandem-error-bin", detail),
        ("grpc-status-details-bin", status.SerializeToString()),
        *error_headers(error).items(),
    ]
    if retry_after_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(math.ceil(max(0.0, retry_after_s) * 1e3))))
    return tuple(trailers)
