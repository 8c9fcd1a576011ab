"""Compiles an entry point over the kernels' sources for several kinds of vectors; tests nothing itself."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tandem_kernels.native import build

WIDTHS = {"machine": (), "avx2": ("-mno-avx512f",), "plain": ("-mno-avx512f", "-mno-avx2", "-mno-f16c")}
"""Builds by what they must do without; on a machine without one of these two builds are the same."""
Without = Mapping[str, tuple[str, ...]]


def compile_each(entry: str, without: Without, folder: Path) -> dict[str, Path]:
    """Libraries by build; where there is one kind of vectors only, of the builds that do without nothing."""
    source = folder / "entry.cpp"
    source.write_text(entry)
    able = [name for name in without if platform.machine() == "x86_64" or not without[name]]
    found = {name: folder / f"{name}.so" for name in able}
    for name, target in found.items():
        command = [build._find_compiler(), *build._FLAGS, *without[name], f"-I{build._SOURCES}"]
        subprocess.run([*command, source, "-o", target], check=True, timeout=300)
    return found
