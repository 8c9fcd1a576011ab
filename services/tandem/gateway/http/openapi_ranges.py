"""List the ranges of body fields for the OpenAPI document. `openai.request_params` and SamplingParams check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.core.request import MAX_CHOICES, MAX_COUNT, MAX_TOP_LOGPROBS
from tandem.gateway.openai.request_params import MAX_SALT_CHARS

_ALTERNATIVES = {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}

RANGES: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_COUNT},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 10},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "logprobs": _ALTERNATIVES,
    "top_logprobs": _ALTERNATIVES,
    "prompt_logprobs": _ALTERNATIVES,
    "priority": {"minimum": -MAX_COUNT, "maximum": MAX_COUNT},
    "cache_salt": {"minLength": 1, "maxLength": MAX_SALT_CHARS},
    "messages": {"minItems": 1},
}
"""JSON Schema keywords by field name, for every body that has the field."""


def narrowed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a body or message with the ranges of its fields added."""
    fields = {name: {**facts, **RANGES.get(name, {})} for name, facts in schema.get("properties", {}).items()}
    return {**schema, "properties": fields}
