"""What an output must look like, as a value; never compiles it or says what may come next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

GrammarKind = Literal["json_schema", "regex", "lark"]

JSON_FORM: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""How JSON is written where a schema asks for it, as llguidance's options: one blank at most, behind a comma or colon,
so that no model loops on blanks; both ways of Python's `json`."""
MAX_SOURCE_CHARS = 256 * 1024
MAX_SYMBOLS = 50_000
MAX_LEXER_STATES = 25_000
"""Of one grammar: half a second of compiling, and at most some 20 MB."""
MAX_STEP_ITEMS = 8_000
MAX_STEP_FUEL = 100_000
"""Of one mask, in Earley items and in llguidance's units of lexer work: at most some 10 ms, for which every sequence of
a step waits; `e: e e | "a"` takes 300 ms with llguidance's own bounds. Objects of 400 optional properties pass."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """`source` is a JSON schema (`{}`: any JSON), a regular expression, or a grammar in llguidance's dialect of Lark.
    The end of sequence may be drawn where the grammar may end, and must where nothing else may follow."""

    kind: GrammarKind
    source: str
