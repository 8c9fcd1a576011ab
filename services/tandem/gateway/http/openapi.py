"""Document all routes, as an OpenAPI 3.1 document and as an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.responses import HTMLResponse, Response

from tandem.gateway.context.request_context import DOCUMENTED_HEADERS
from tandem.gateway.http.exchange import Exchange, json_response
from tandem.gateway.http.openai_schema import ErrorReply
from tandem.gateway.http.page_headers import page_headers
from tandem.gateway.http.routes import HandlerRoute, Operation, routes_of

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font-size: 14px; } td, th { text-align: left; vertical-align: top; padding: .1rem 1rem .1rem 0; }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tandem</title><style>{style}</style></head><body>
<h1>Tandem</h1><p>OpenAPI document: <a href="openapi.json">openapi.json</a></p>
{body}</body></html>
"""


class OpenApiDocs:
    """Serve `/openapi.json` and the HTML page `/docs`, which describe `routes` and these two routes. Both are built
    once, on construction."""

    def __init__(self, routes: Sequence[HandlerRoute]) -> None:
        described = [*routes, *routes_of(self)]
        document = describe(described)
        self._document = msgspec.json.encode(document)
        self._page = _PAGE.format(style=_STYLE, body="".join([*map(_section, described), _schema_tables(document)]))

    @Operation("GET", "/openapi.json", "OpenAPI document of this server", text="application/json")
    async def show_document(self, exchange: Exchange) -> Response:
        return json_response(self._document)

    @Operation("GET", "/docs", "HTML page of all routes", text="text/html")
    async def show_page(self, exchange: Exchange) -> Response:
        return HTMLResponse(self._page, headers=page_headers(_STYLE))


def describe(routes: Sequence[HandlerRoute]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes, as JSON values. Its schemas and their descriptions come from the
    structs of the bodies and replies."""
    kinds: list[Any] = [ErrorReply]
    for route in routes:
        documented = route.operation
        kinds += filter(None, (documented.body, documented.reply, documented.chunk, documented.not_ready))
    found, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = {kind: {"schema": schema} for kind, schema in zip(kinds, found, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path_format, {})[route.operation.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": version("tandem"),
            "summary": "OpenAI-compatible LLM serving",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        # `{}`: with `auth: off` no key is required.
        "security": [{"key": []}, {}],
    }


def _operation(route: HandlerRoute, schemas: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    documented = route.operation
    name = f"{documented.method.lower()}{route.path_format.translate(str.maketrans('/.{}', '____'))}"
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in route.param_convertors
    ]
    if documented.chunk is not None:
        parameters += [
            {"name": name, "in": "header", "description": meaning, "schema": {"type": "string", **schema}}
            for name, (meaning, schema) in DOCUMENTED_HEADERS.items()
        ]
    found: dict[str, Any] = {
        "operationId": name,
        "summary": documented.summary,
        "parameters": parameters,
        "responses": _responses(documented, schemas),
    }
    if documented.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": schemas[documented.body]}}
    return found


def _responses(documented: Operation, schemas: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    if documented.reply is None:
        kind = "object" if documented.text == "application/json" else "string"
        content: dict[str, Any] = {documented.text: {"schema": {"type": kind}}}
    else:
        content = {"application/json": schemas[documented.reply]}
    if documented.chunk is not None:
        content["text/event-stream"] = {"schema": _event(schemas[documented.chunk], schemas[ErrorReply])}
    responses: dict[str, Any] = {"200": {"description": "Success.", "content": content}}
    by_status: dict[int, list[str]] = {}
    for error in documented.errors:
        by_status.setdefault(error.http, []).append(error.value)
    for status, codes in sorted(by_status.items()):
        error_content = {"application/json": schemas[ErrorReply]}
        responses[str(status)] = {"description": f"code: {', '.join(codes)}", "content": error_content}
    if documented.not_ready is not None:
        not_ready = {"application/json": schemas[documented.not_ready]}
        responses["503"] = {"description": "Not ready; names what is missing.", "content": not_ready}
    for refusal in responses.keys() & {"429", "503"}:
        responses[refusal]["headers"] = {"retry-after": {"schema": {"type": "integer"}, "description": "seconds"}}
    return responses


def _event(chunk: Mapping[str, Any], error: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of one server-sent event."""
    payload = {"anyOf": [chunk["schema"], error["schema"]]}
    data = {"anyOf": [{"const": "[DONE]"}, {"contentMediaType": "application/json", "contentSchema": payload}]}
    meaning = "A server-sent event. The data of the last one is [DONE], unless an error ends the stream."
    return {"type": "object", "description": meaning, "properties": {"data": data}}


# ---- the page


def _section(route: HandlerRoute) -> str:
    documented = route.operation
    title = escape(f"{documented.method} {route.path_format}")
    lines = [f"<h3><code>{title}</code></h3><p>{escape(documented.summary)}</p>"]
    named = (("body", documented.body), ("reply", documented.reply), ("streamed", documented.chunk))
    links = [f'{role} <a href="#{kind.__name__}">{kind.__name__}</a>' for role, kind in named if kind is not None]
    codes = [f"{kind.http} {kind.value}" for kind in documented.errors]
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
