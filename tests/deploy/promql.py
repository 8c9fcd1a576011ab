"""Finds the series and labels that a PromQL expression names; never evaluates it, and knows no more of its grammar."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

_TOKEN = re.compile(r'"[^"]*"|\[[^\]]*\]|[a-zA-Z_:][a-zA-Z0-9_:]*|[0-9.]+[a-z]*|\$\w+|=~|!~|!=|==|>=|<=|\S')
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = _GROUPING | {"and", "or", "unless", "bool", "offset"}
_AFTER_FUNCTIONS = {"(", "by", "without"}
_MATCHES = {"=", "!=", "=~", "!~"}


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric with the labels that its matchers name."""

    metric: str
    labels: frozenset[str]


@dataclass(frozen=True, slots=True)
class Names:
    """All that an expression names. `grouped` are labels of `by`, `on` and their like."""

    selectors: tuple[Selector, ...]
    grouped: frozenset[str]


def names_in(expression: str) -> Names:
    tokens = _TOKEN.findall(expression)
    selectors: list[Selector] = []
    grouped: set[str] = set()
    place = 0
    while place < len(tokens):
        token, following = tokens[place], tokens[place + 1] if place + 1 < len(tokens) else ""
        place += 1
        if token in _GROUPING and following == "(":
            end = tokens.index(")", place)
            grouped |= {word for word in tokens[place:end] if _NAME.fullmatch(word)}
            place = end
        elif _NAME.fullmatch(token) and token not in _WORDS and following not in _AFTER_FUNCTIONS:
            end = tokens.index("}", place) if following == "{" else place
            inside = tokens[place:end]
            labels = {name for name, match in pairwise(inside) if match in _MATCHES}
            selectors.append(Selector(token, frozenset(labels)))
            place = end
    return Names(tuple(selectors), frozenset(grouped))
