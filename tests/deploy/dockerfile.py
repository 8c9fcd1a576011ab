"""Dockerfiles as their stages and instructions; never builds one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Stage:
    """`name` is empty where none was given; `source` is an image or a stage before. An instruction is its first word
    and the rest, on one line."""

    name: str
    source: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [rest for first, rest in self.instructions if first == word]


def read_stages(path: Path) -> list[Stage]:
    """In the order of the file."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    stages: list[Stage] = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            source, _, name = rest.partition(" AS ")
            stages.append(Stage(name, source))
        elif word and stages:
            stages[-1].instructions.append((word, rest))
    return stages


def lineage(stages: list[Stage], name: str) -> list[Stage]:
    """What an image is made of, its own stage first: that of a name, the last one for an empty name."""
    found = [next(stage for stage in reversed(stages) if not name or stage.name == name)]
    while parents := [stage for stage in stages if stage.name == found[-1].source]:
        found += parents
    return found
