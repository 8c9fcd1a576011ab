"""Document all routes, as an OpenAPI 3.1 document and as an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import version
from typing import Any

import msgspec

from tandem.core.errors import ERROR_TABLE
from tandem.core.lane import Lane
from tandem.core.request import MAX_CHOICES, MAX_COUNT, MAX_TOP_LOGPROBS
from tandem.gateway.context.request_context import (
    EXPLAIN_HEADER,
    LANE_HEADER,
    MAX_TIMEOUT_MS,
    SESSION_HEADER,
    TIMEOUT_HEADER,
    TIMING_HEADER,
    TRACEPARENT_HEADER,
)
from tandem.gateway.http.exchange import Exchange
from tandem.gateway.http.openai_schema import ErrorReply
from tandem.gateway.http.routes import Route
from tandem.gateway.openai.request_params import MAX_SALT_CHARS
from tandem.gateway.openai.request_schema import ChatMessage

_REF = "#/components/schemas/{name}"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tandem</title><style>
body {{ font: 15px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
code {{ font-size: 14px; }} td, th {{ text-align: left; vertical-align: top; padding: .1rem 1rem .1rem 0; }}
</style></head><body><h1>Tandem</h1><p>OpenAPI document: <a href="openapi.json">openapi.json</a></p>
{body}</body></html>
"""


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


class OpenApiDocs:
    """Serve `/openapi.json` and `/docs`, which describe all routes, these two included."""

    __slots__ = ("_document", "_page")

    def __init__(self) -> None:
        self._document = b""
        self._page = ""

    def routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path="/openapi.json",
                handler=self._show_document,
                summary="OpenAPI document of this server",
                text="application/json",
            ),
            Route(
                method="GET", path="/docs", handler=self._show_page, summary="HTML page of all routes", text="text/html"
            ),
        ]

    def write(self, routes: Sequence[Route]) -> None:
        document = describe(routes)
        self._document = msgspec.json.encode(document)
        self._page = _PAGE.format(body="".join([*map(_section, routes), _schema_tables(document)]))

    async def _show_document(self, exchange: Exchange) -> None:
        await exchange.send_json(200, self._document)

    async def _show_page(self, exchange: Exchange) -> None:
        await exchange.send_body("text/html; charset=utf-8", self._page.encode())


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """Build the OpenAPI document of the routes. Its schemas, with their descriptions, come from the structs of the
    bodies and replies."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    kinds = {kind: None for route in routes for kind in (route.body, route.reply, route.chunk, route.not_ready) if kind}
    _, schemas = msgspec.json.schema_components([*kinds, ErrorReply], ref_template=_REF)
    inputs = {*(route.body.__name__ for route in routes if route.body), ChatMessage.__name__}
    schemas = {name: narrowed(schema) if name in inputs else schema for name, schema in schemas.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": version("tandem"),
            "summary": "OpenAI-compatible LLM serving",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        # `{}`: with `auth: off` no key is required.
        "security": [{"key": []}, {}],
    }


def _operation(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{route.path.translate(str.maketrans('/.{}', '____'))}",
        "summary": route.summary,
        "parameters": _parameters(route),
        "responses": _responses(route),
    }
    if route.body is not None:
        found["requestBody"] = {"required": True, "content": _json(route.body)}
    return found


def _parameters(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if route.prefix is not None:
        name = route.path.removeprefix(route.prefix).strip("{}")
        schema = {"type": "string", "minLength": 1}
        found.append({"name": name, "in": "path", "required": True, "schema": schema})
    if route.chunk is not None:
        schema = {"type": "string", "enum": [lane.label for lane in Lane]}
        meaning = "Lane (priority class) of the request, at most the highest lane that the key allows."
        found.append({"name": LANE_HEADER, "in": "header", "description": meaning, "schema": schema})
        schema = {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS}
        meaning = "The client's deadline: a request that would miss it is refused at once, one that misses it is ended."
        found.append({"name": TIMEOUT_HEADER, "in": "header", "description": meaning, "schema": schema})
        meaning = "Session: its requests go to the same workers where that costs nothing. Default: the field `user`."
        found.append({"name": SESSION_HEADER, "in": "header", "description": meaning, "schema": {"type": "string"}})
        meaning = "1: the response's field `tandem` has the reasons of the placement, with the predicted costs."
        schema = {"type": "string", "enum": ["0", "1"]}
        found.append({"name": EXPLAIN_HEADER, "in": "header", "description": meaning, "schema": schema})
        meaning = "1: the response's field `tandem` has the time of each stage; unless streamed, so has a header."
        found.append({"name": TIMING_HEADER, "in": "header", "description": meaning, "schema": schema})
        meaning = "The client's trace, which the request joins where the gateway exports traces."
        found.append({"name": TRACEPARENT_HEADER, "in": "header", "description": meaning, "schema": {"type": "string"}})
    return found


def _responses(route: Route) -> dict[str, Any]:
    content = {route.text: {"schema": {"type": "string"}}} if route.reply is None else _json(route.reply)
    if route.reply is not None and route.is_list:
        content = {"application/json": {"schema": {"type": "array", "items": _schema(route.reply)}}}
    if route.text == "application/json":
        content = {route.text: {"schema": {"type": "object"}}}
    if route.chunk is not None:
        content["text/event-stream"] = {"schema": _event(route.chunk)}
    responses: dict[str, Any] = {"200": {"description": "Success.", "content": content}}
    by_status: dict[int, list[str]] = {}
    for kind in route.errors:
        by_status.setdefault(ERROR_TABLE[kind].http, []).append(kind.value)
    for status, codes in sorted(by_status.items()):
        responses[str(status)] = {"description": f"code: {', '.join(codes)}", "content": _json(ErrorReply)}
    if route.not_ready is not None:
        responses["503"] = {"description": "Not ready; names what is missing.", "content": _json(route.not_ready)}
    for refusal in responses.keys() & {"429", "503"}:
        responses[refusal]["headers"] = {"retry-after": {"schema": {"type": "integer"}, "description": "seconds"}}
    return responses


def _event(chunk: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schema of one server-sent event."""
    payload = {"anyOf": [{"$ref": _REF.format(name=kind.__name__)} for kind in (chunk, ErrorReply)]}
    data = {"anyOf": [{"const": "[DONE]"}, {"contentMediaType": "application/json", "contentSchema": payload}]}
    meaning = "A server-sent event. The data of the last one is [DONE], unless an error ends the stream."
    return {"type": "object", "description": meaning, "properties": {"data": data}}


def _json(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": _schema(kind)}}


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": _REF.format(name=kind.__name__)}


# ---- the page


def _section(route: Route) -> str:
    lines = [f"<h3><code>{escape(f'{route.method} {route.path}')}</code></h3><p>{escape(route.summary)}</p>"]
    named = (("body", route.body), ("reply", route.reply), ("streamed", route.chunk))
    links = [f'{role} <a href="#{kind.__name__}">{kind.__name__}</a>' for role, kind in named if kind is not None]
    codes = [f"{ERROR_TABLE[kind].http} {kind.value}" for kind in route.errors]
    return "".join([*lines, f"<p>{', '.join(links)}</p>", f"<p>{escape(', '.join(codes))}</p>"])


def _schema_tables(document: Mapping[str, Any]) -> str:
    tables = []
    for name, schema in sorted(document["components"]["schemas"].items()):
        rows = "".join(
            f"<tr><td><code>{escape(field)}</code></td><td><code>{escape(_kind(facts))}</code></td></tr>"
            for field, facts in schema.get("properties", {}).items()
        )
        meaning = escape(schema.get("description", ""))
        tables.append(f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{meaning}</p><table>{rows}</table>')
    return "".join(tables)


def _kind(schema: Mapping[str, Any]) -> str:
    """Describe the type of a schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"[{_kind(schema.get('items', {}))}]"
    return str(schema.get("type", "any"))


def narrowed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a body or message with the ranges of its fields added."""
    fields = {name: {**facts, **RANGES.get(name, {})} for name, facts in schema.get("properties", {}).items()}
    return {**schema, "properties": fields}
