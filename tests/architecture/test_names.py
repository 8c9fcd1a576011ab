"""What names in the code must be: a class name means one thing."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ("services/tandem", "kernels", "loadtest")
CLASS = re.compile(r"^ *class ([^\W_]\w*)[(:\[]", re.MULTILINE)


def test_a_class_name_is_unique_or_private() -> None:
    """Who searches for a class finds one. Names with an underscore belong to their file."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*.py")):
            if path.parent.name == "gen":
                continue
            for name in CLASS.findall(path.read_text()):
                found[name].append(str(path.relative_to(ROOT)))
    assert len(found) > 500
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
