"""Generate helm/tandem/values.schema.json, the schema of the chart's values, from helm/schema.yaml and the settings.

An object with `settings: SECTION` accepts every setting of that section, with the type, choices, limits and description
of the setting. `without` names the settings that the chart sets itself. Properties in helm/schema.yaml take precedence.
`--check` writes nothing and exits 1 when the committed file is not what would be written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml
from committed import keep

from tandem.core.config import MAX_FLOAT
from tandem.core.settings import Setting, format_default, settings

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "helm" / "schema.yaml"
TARGET = ROOT / "helm" / "tandem"

BYTES = {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?\s*([kKmMgGtT]i?)?[bB]?$", "minimum": 0}

Node = dict[str, Any]


def main() -> int:
    return keep("Generate the schema of the chart's values.", TARGET, "*.schema.json", generate, "make chart")


def generate() -> dict[str, str]:
    source = yaml.safe_load(SOURCE.read_text())
    del source["parts"]
    return {"values.schema.json": json.dumps(made(source), indent=1, ensure_ascii=False) + "\n"}


def made(node: Any) -> Any:
    """Return a schema in which `settings` is replaced by properties, and objects with properties accept no others."""
    if isinstance(node, list):
        return [made(one) for one in node]
    if not isinstance(node, dict):
        return node
    if "settings" in node:
        node = with_settings(node)
    closed = {"additionalProperties": False} if "properties" in node and node.get("type") == "object" else {}
    return {**{key: made(value) for key, value in node.items()}, **closed}


def with_settings(node: Node) -> Node:
    section, without = node["settings"], node.get("without", [])
    found = {one.name: one for one in settings() if one.section == section}
    if unknown := sorted(set(without) - found.keys()):
        raise SystemExit(f"helm/schema.yaml: {section} has no setting {', '.join(unknown)}")
    own = {name: dict(value) for name, value in node.get("properties", {}).items()}
    for name, setting in found.items():
        if name not in without:
            own[name] = {**described(setting), **own.get(name, {})}
    rest = {key: value for key, value in node.items() if key not in ("settings", "without", "properties")}
    return {**rest, "type": "object", "properties": own}


def described(setting: Setting) -> Node:
    doc = {"description": f"Setting {setting.key}: {setting.doc} (default: {format_default(setting.default)})"}
    schema = msgspec.json.schema(setting.annotation, schema_hook=lambda _: dict(BYTES))
    if setting.choices:
        # YAML 1.1 reads a bare `off` as false, and so does Helm.
        words = [word for name, word in (("off", False), ("on", True)) if name in setting.choices]
        schema["enum"] = [*setting.choices, *words]
    return {**doc, **{key: value for key, value in schema.items() if value != MAX_FLOAT}}


if __name__ == "__main__":
    sys.exit(main())
