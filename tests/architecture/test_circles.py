"""Modules and folders import each other in no circle."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREES = ((ROOT / "services", "tandem"), (ROOT / "kernels", "tandem_kernels"), (ROOT, "loadtest"))


def modules() -> dict[str, Path]:
    """Return all modules of the product and of the measurements by dotted name, generated ones left out."""
    found = {}
    for base, package in TREES:
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            if "gen" not in parts:
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(node: ast.AST) -> Iterable[ast.stmt]:
    """Yield all statements in a node, also inside functions; a visit of their expressions takes three times as long."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(child)


def imports(tree: ast.AST, known: Mapping[str, Path]) -> Iterable[str]:
    """Yield the known modules that a module imports, also inside functions."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return a circle of the graph, empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_modules_and_folders_import_each_other_in_no_circle() -> None:
    known = modules()
    assert len(known) > 500
    of_modules: dict[str, set[str]] = defaultdict(set)
    of_folders: dict[str, set[str]] = defaultdict(set)
    for module, path in known.items():
        folder = module if path.stem == "__init__" else module.rpartition(".")[0]
        for other in imports(ast.parse(path.read_text()), known):
            if other not in known or other == module:
                continue
            of_modules[module].add(other)
            target = other if known[other].stem == "__init__" else other.rpartition(".")[0]
            # A folder composes its sub-folders, and these use what lies beside them.
            if not (f"{folder}.".startswith(f"{target}.") or f"{target}.".startswith(f"{folder}.")):
                of_folders[folder].add(target)
    assert not circle(of_modules) and not circle(of_folders)


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
