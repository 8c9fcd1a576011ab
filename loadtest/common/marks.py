"""Replace a marked part of a Markdown document."""

from __future__ import annotations

import re
from pathlib import Path


def put_between_marks(path: Path, mark: str, text: str) -> None:
    """Replace the text between `<!-- MARK -->` and `<!-- end of MARK -->` in a document. Raises SystemExit, and changes
    nothing, where one of them is missing."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    before = path.read_text()
    if not pattern.search(before):
        raise SystemExit(f"loadtest: {path} has no {begin} with its {end}")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}{end}", before))
