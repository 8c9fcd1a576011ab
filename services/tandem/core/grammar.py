"""Define the grammar that constrains an output, and the limits on its size and cost; does not compile it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

GrammarKind = Literal["json_schema", "regex", "lark"]

JSON_FORM: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Options for llguidance's JSON output: at most one blank, after a comma or colon, so that no model loops on blanks;
matches both separator styles of Python's `json`."""
MAX_SOURCE_CHARS = 256 * 1024
MAX_SYMBOLS = 50_000
MAX_LEXER_STATES = 25_000
"""Limits of one grammar, which takes some 20 MB at most."""
MAX_PROPERTIES = 5_000
MAX_OPTIONAL_PROPERTIES, MAX_OPTIONAL_IN_LARK = 500, 120
MAX_PATTERN_PROPERTIES = 100
MAX_CONSTRAINED_VALUES = 1_000
MAX_ENUM_VALUES = 15_000
MAX_OBJECTS = 20_000
"""Limits of the JSON schemas of one request together, except MAX_OPTIONAL_PROPERTIES, the limit of properties in one
object that are not required, and MAX_OPTIONAL_IN_LARK, the same for a schema within a Lark grammar. Compiling takes
time in the square of the former number, and in the cube of the number of pattern properties; a constrained value has a
keyword such as `pattern`, `format` or `minimum`; objects are all JSON objects of the source. Each limit alone keeps the
check under some 0.25 s of processor time, while 400 pattern properties would take 8 s. Objects of more properties that
are not required have more Earley items than a worker accepts, which accepts fewer in Lark."""
MAX_COMPILE_S = 1.0
"""Limit of the processor time of one compilation, in seconds, for grammars that are slow for other reasons."""
MAX_STEP_ITEMS = 8_000
MAX_STEP_FUEL = 100_000
"""Limits of one mask, in Earley items and in llguidance's units of lexer work: some 10 ms at most, for which every
sequence of a step waits. Objects of 400 optional properties pass; `e: e e | "a"` takes 300 ms with llguidance's own
limits."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an output. `source` is, by `kind`, a JSON schema (`{}`: any JSON), a regular expression, or a
    grammar in llguidance's dialect of Lark.

    The output may end where the grammar may end, and must end where nothing else may follow.
    """

    kind: GrammarKind
    source: str
