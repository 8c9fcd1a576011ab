"""What a program's /metrics says at one moment, for tests that add it up; never waits for a figure."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Scrape:
    """All samples, by name and attributes."""

    samples: tuple[tuple[str, dict[str, str], float], ...]

    @classmethod
    def of(cls, address: str) -> Scrape:
        """`address`: host:port. Blocks."""
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30.0) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return cls(tuple((s.name, dict(s.labels), s.value) for family in families for s in family.samples))

    def sum(self, name: str, **attributes: str) -> float:
        """Of all series with these attributes; 0 where there is none."""
        named = [(labels, value) for found, labels, value in self.samples if found == name]
        return sum(value for labels, value in named if attributes.items() <= labels.items())

    def names(self) -> set[str]:
        return {name for name, _, _ in self.samples}
