"""What an output must look like, as a value; never compiles it or says what may come next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """`source` is a JSON schema (`{}`: any JSON), a regular expression, or a grammar in llguidance's dialect of Lark.
    The end of sequence may be drawn where the grammar may end, and must where nothing else may follow."""

    kind: GrammarKind
    source: str
