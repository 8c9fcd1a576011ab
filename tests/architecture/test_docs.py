"""Test that docs/ lists exactly the fields, errors, reasons and tenant settings of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec

from tandem.admission.tenant import Tenant
from tandem.core.errors import ErrorKind
from tandem.core.lane import Lane
from tandem.gateway.context.request_context import (
    EXPLAIN_HEADER,
    FAIRNESS_HEADERS,
    LANE_HEADER,
    OBJECTIVE_HEADERS,
    TIMEOUT_HEADER,
    TIMING_HEADER,
    TRACEPARENT_HEADER,
)
from tandem.gateway.openai import request_schema as openai_schema
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody
from tandem.gateway.tenants.tenants_watch import read_tenants

ROOT = Path(__file__).resolve().parents[2]
HTTP = (ROOT / "docs/http.md").read_text()
TENANTS = (ROOT / "docs/tenants.md").read_text()
EXAMPLE = ROOT / "docs/tenants.yaml"


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table rows between a heading and the next one."""
    section = re.split(r"^## ", text.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_field_is_described_once_and_where_it_is() -> None:
    documented = {name: where for cell, where, *_ in rows(HTTP, "Parameters") for name in names(cell)}
    chat, text = ({field.name for field in msgspec.structs.fields(kind)} for kind in (ChatBody, CompletionBody))
    assert documented == {
        name: "both" if name in chat & text else "chat" if name in chat else "text" for name in sorted(chat | text)
    }
    assert sum(len(names(row[0])) for row in rows(HTTP, "Parameters")) == len(documented)


def test_every_refused_field_is_named() -> None:
    listed = HTTP.partition("Refused by name")[2].partition("\n")[2].partition(". Content")[0]
    off = {name for table in openai_schema._OFF_OF.values() for name in table}
    served = {field.name for kind in (ChatBody, CompletionBody) for field in msgspec.structs.fields(kind)}
    assert names(listed) == sorted(off - served)


def test_the_error_table_is_the_code_s() -> None:
    documented = [(*names(code + grpc + kind), http) for code, http, grpc, kind in rows_of_errors()]
    expected = [(k.value, k.grpc, k.openai_type, str(k.http)) for k in ErrorKind]
    assert documented == expected


def rows_of_errors() -> list[list[str]]:
    return [row for row in rows(HTTP, "Errors") if len(row) == 4]


def test_every_reason_is_in_the_table() -> None:
    documented = {name for row in rows(HTTP, "Errors") if len(row) == 3 for name in names(row[0])}
    written = set[str]()
    for room in ("gateway", "admission", "orchestration"):
        for path in (ROOT / "services/tandem" / room).glob("*.py"):
            for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Name) and call.func.id == "TandemError":
                    written |= {
                        word.value.value
                        for word in call.keywords
                        if word.arg == "reason" and isinstance(word.value, ast.Constant)
                    }
    assert written and written <= documented


def test_the_headers_are_the_code_s() -> None:
    documented = {name for row in rows(HTTP, "Headers") for name in names(row[0])}
    assert {LANE_HEADER, TIMEOUT_HEADER, EXPLAIN_HEADER, TIMING_HEADER, TRACEPARENT_HEADER} <= documented
    assert {OBJECTIVE_HEADERS[0], FAIRNESS_HEADERS[0]} <= documented
    assert all(f"`{header}`" in HTTP for header in (*OBJECTIVE_HEADERS, *FAIRNESS_HEADERS))
    assert all(f"`{lane.label}`" in HTTP for lane in Lane)


def test_the_example_of_tenants_is_taken_and_shows_every_setting() -> None:
    tenants = read_tenants(EXAMPLE, "prefer").tenants
    assert {str(name): tenant.lane for name, tenant in tenants.items()} == {
        "acme": Lane.INTERACTIVE,
        "nightly": Lane.BATCH,
        "operations": Lane.STANDARD,
        "edge": Lane.STANDARD,
    }
    settings = {name for name in Tenant.__dataclass_fields__ if name != "id"} | {"keys"}
    assert {name for name in settings if re.search(rf"\b{name}:", EXAMPLE.read_text())} == settings
    head = TENANTS.partition("## Quotas")[0]
    assert {
        name for line in head.splitlines() if line.startswith("| `") for name in names(line.split("|")[1])
    } == settings
