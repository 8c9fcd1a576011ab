"""Schemas of custom resources, closed for keys that they do not know; never has a copy of one."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.chart.release import ROOT, Object

PLACE = Path(os.environ.get("TANDEM_CRDS", ROOT.parent / "shared" / "crds"))
_MISSING = f"the schemas of custom resources are not at {PLACE}: TANDEM_CRDS says where they are"
_INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}


def violations(custom: Object) -> list[str]:
    """Each as place and message; empty when nothing is wrong. Skips where there are no schemas."""
    group, _, version = custom["apiVersion"].partition("/")
    found = _validator(f"{group}_{version}_{custom['kind'].lower()}.json").iter_errors(custom)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    if not PLACE.is_dir():
        pytest.skip(_MISSING)
    schema = closed(json.loads((PLACE / name).read_text()))
    # These two are not the CRD's own.
    schema["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {}}
    return jsonschema.Draft202012Validator(schema)


def closed(node: Any) -> Any:
    """The same, in which an object has no other keys than those it lists, unless it keeps whatever it is given."""
    if isinstance(node, list):
        return [closed(one) for one in node]
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string"):
        return {**_INT_OR_STRING, **({"pattern": node["pattern"]} if "pattern" in node else {})}
    made = {key: closed(value) for key, value in node.items() if not key.startswith("x-kubernetes-")}
    is_open = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
    if isinstance(node.get("properties"), dict) and node.get("type") == "object" and not is_open:
        made["additionalProperties"] = False
    return made
