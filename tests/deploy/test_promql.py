"""The names that a PromQL expression has are found, and nothing else."""

from __future__ import annotations

import pytest

from tests.deploy.promql import Selector, names_in


@pytest.mark.parametrize(
    ("expression", "metrics", "grouped"),
    [
        ("up", {"up": set()}, set()),
        ('up{job=~"tandem-.*"} == 0', {"up": {"job"}}, set()),
        ('sum by (a, b) (rate(x_total{c="d",e!~"f|g"}[5m])) or vector(0)', {"x_total": {"c", "e"}}, {"a", "b"}),
        ("sum(x) by (a) / on (b) group_left (c) y", {"x": set(), "y": set()}, {"a", "b", "c"}),
        ("a:b:rate5m > 14.4 * (1 - scalar(a:c))", {"a:b:rate5m": set(), "a:c": set()}, set()),
        ("x offset 5m unless max_over_time(y[1h]) > 1e3", {"x": set(), "y": set()}, set()),
        ("x{a=\"by (b) y{c='d'}\"}[$__rate_interval]", {"x": {"a"}}, set()),
    ],
)
def test_names(expression: str, metrics: dict[str, set[str]], grouped: set[str]) -> None:
    found = names_in(expression)
    assert set(found.selectors) == {Selector(metric, frozenset(labels)) for metric, labels in metrics.items()}
    assert found.grouped == grouped
