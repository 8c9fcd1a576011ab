"""Test that the settings, flags and chart values that the doctor's texts name exist."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path
from typing import Any

import yaml

from tandem.cli.subcommands import SUBCOMMANDS
from tandem.core.settings import flags_of, settings
from tests.architecture.test_docs import names

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/doctor.md").read_text()
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "helm/tandem/values.yaml").read_text())
FILES = {"model.safetensors", "model.safetensors.index", "worker.proto"}
"""Names that look like settings and are none."""
ELSEWHERE = {
    "--add-host",
    "--cap-add",
    "--device",
    "--shm-size",
    "--ulimit",
    "--index-url",
    "--query-gpu",
    "--format",
    "--latency",
}
"""Flags of Docker, pip, nvidia-smi and redis-cli."""


def written() -> str:
    """Return the source text of all doctor modules."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "services/tandem/doctor").glob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return "\n".join(node.value for node in nodes if isinstance(node.value, str))


def own_flags(*subcommands: str) -> set[str]:
    """Return the flags that `tandem SUBCOMMAND` has besides those of settings."""
    parser = argparse.ArgumentParser(add_help=False)
    for subcommand in subcommands:
        SUBCOMMANDS[subcommand].add_flags(parser)
    return set(parser._option_string_actions)


def test_every_setting_and_every_key_of_values_that_is_named_is_there() -> None:
    keys = {setting.key for setting in settings()}
    sections = "|".join(sorted({key.partition(".")[0] for key in keys} | {"tenants", "cache", r"pools\.<name>"}))
    named = set(re.findall(rf"(?<![\w./-])((?:{sections})\.[a-z][A-Za-z_]*(?:\.[a-z][A-Za-z]*)?)(?![\w(/])", written()))
    assert len(named & keys) > 20 and len(named - keys) > 8
    assert {key for key in named - keys - FILES if not is_value(key)} == set()
    assert "colocate" in VALUES["poolDefaults"]


def test_every_flag_that_is_named_is_one() -> None:
    flags = {flag for found in flags_of().values() for flag in found} | own_flags("doctor", "drain") | ELSEWHERE
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", written()))
    assert len(named) > 8 and named <= flags


def test_the_page_has_the_doctor_s_own_flags() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `--")]
    named = {name.split()[0] for row in rows for name in names(row.split("|")[1])}
    assert named == own_flags("doctor")


def is_value(key: str) -> bool:
    """`pools.<name>` has what `poolDefaults` has."""
    found: Any = VALUES
    for part in key.replace("pools.<name>", "poolDefaults").split("."):
        if not isinstance(found, dict) or part not in found:
            return False
        found = found[part]
    return True
