"""Build HTTP calls from requests: body, headers, and the next turn of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from loadtest.client import workloads
from loadtest.client.endpoint import Endpoint
from loadtest.client.records import Record
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.workload import seeded_random
from tandem.workload.scheduled_request import Follow, ScheduledRequest


class TimedCall(msgspec.Struct, kw_only=True):
    """One HTTP call as the client sends it.

    `body` is JSON and is emptied once sent. With `is_exact` the answer may not end before `num_requested_tokens`.
    `follow` makes the conversation's next call from the record of this one.
    """

    name: str
    group: str
    num_prompt_tokens: int
    num_requested_tokens: int
    body: bytes
    due_s: float = 0.0
    tenant: str = ""
    headers: Mapping[str, str] = {}
    is_exact: bool = True
    follow: Callable[[Record], TimedCall] | None = None


_JSON = {"content-type": "application/json"}
_TIERS = {Lane.STANDARD: "default", Lane.BATCH: "flex"}


def greedy_call(endpoint: Endpoint, request: workloads.BenchRequest) -> TimedCall:
    """Build the call of a bench request: greedy sampling, and an answer of exactly `max_tokens` tokens."""
    fields = {"max_tokens": request.max_tokens, "temperature": 0, "ignore_eos": True}
    return TimedCall(
        name=request.name,
        group=request.group,
        num_prompt_tokens=len(request.prompt),
        num_requested_tokens=request.max_tokens,
        body=_body(endpoint, request.prompt, fields),
        due_s=request.due_s,
        headers=_JSON,
    )


class Caller:
    """Build the calls of scheduled requests to one endpoint.

    `keys` maps a tenant to its API key. Priority and lane are sent only `with_priority`, because not every endpoint
    accepts them.
    """

    def __init__(self, endpoint: Endpoint, keys: Mapping[str, str], *, with_priority: bool = False) -> None:
        self._endpoint = endpoint
        self._headers = {tenant: {**_JSON, "authorization": f"Bearer {key}"} for tenant, key in keys.items()}
        self._with_priority = with_priority

    def call(self, scheduled: ScheduledRequest) -> TimedCall:
        request = scheduled.request
        return TimedCall(
            name=request.id,
            group=scheduled.group,
            tenant=scheduled.tenant,
            num_prompt_tokens=len(request.prompt_tokens),
            num_requested_tokens=request.sampling.max_tokens,
            body=_body(self._endpoint, request.prompt_tokens, self._fields(request)),
            due_s=scheduled.due_s,
            headers=self._headers.get(scheduled.tenant, _JSON),
            is_exact=not request.sampling.stop_token_ids,
            follow=self._following(scheduled.follow, request.id) if scheduled.follow is not None else None,
        )

    def _following(self, follow: Follow, name: str) -> Callable[[Record], TimedCall]:
        def next_turn(record: Record) -> TimedCall:
            answer_tokens: Sequence[int] | None = record.tokens
            # An endpoint that reports no token ids cannot be quoted; other tokens take as long to compute.
            if answer_tokens is None:
                answer_tokens = seeded_random.tokens(record.num_output_tokens, name, "answer")
            return self.call(follow(answer_tokens, record.stamps_s[-1]))

        return next_turn

    def _fields(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        fields: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "ignore_eos": not sampling.stop_token_ids,
        }
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        fields |= {name: getattr(sampling, name) for name, value in off.items() if getattr(sampling, name) != value}
        if self._with_priority and request.priority:
            fields["priority"] = request.priority
        if self._with_priority and request.lane is not Lane.INTERACTIVE:
            fields["service_tier"] = _TIERS[request.lane]
        return fields


def _body(endpoint: Endpoint, prompt: Sequence[int], fields: Mapping[str, Any]) -> bytes:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode({"model": endpoint.model, "prompt": prompt, **fields, **streamed, **endpoint.extra})
