"""A command writes its part of a document and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.common.marks import put_between_marks


def test_only_what_is_between_the_marks_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- one -->\nold\n<!-- end of one -->\n<!-- two -->\nb\n<!-- end of two -->\n")
    put_between_marks(path, "one", "\\1 new\n")
    assert path.read_text() == "a\n<!-- one -->\n\\1 new\n<!-- end of one -->\n<!-- two -->\nb\n<!-- end of two -->\n"
    before = path.read_text()
    with pytest.raises(SystemExit, match="no <!-- three -->"):
        put_between_marks(path, "three", "text")
    assert path.read_text() == before
