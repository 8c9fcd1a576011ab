"""Read commands, values files and links from the documents that say how Tandem is run."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

from tests.deploy.files import DEPLOY, ROOT

PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    DEPLOY / "README.md",
    DEPLOY / "RUNBOOK.md",
    DEPLOY / "COMPOSE.md",
    ROOT / "loadtest" / "README.md",
    ROOT / "loadtest" / "RESULTS.md",
    ROOT / "loadtest" / "SCALE.md",
    ROOT / "kernels" / "RESULTS.md",
    ROOT / "tests" / "README.md",
    ROOT / "tests" / "RESULTS.md",
)

WORDS = "(?:tandem|helm|kubectl|docker|openssl)"
"""With which the commands begin that are tried."""


def blocks(page: Path, language: str) -> list[str]:
    """What stands in fences of a language, also within lists."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


def commands(page: Path) -> list[list[str]]:
    """Each command's words: those behind a `$` in blocks, and those in a line of text between backquotes."""
    text = page.read_text()
    lines = []
    for block in blocks(page, "console"):
        joined = block.replace("\\\n", " ")
        lines += re.findall(rf"^\$ ({WORDS} .*)$", joined, re.MULTILINE)
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(quoted.split()) for quoted in re.findall(rf"`({WORDS} [^`]+)`", prose)]
    return [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]


def programs(page: Path) -> list[list[str]]:
    """Arguments of `tandem` in its commands, also of those in a pod."""
    in_pods = [command[command.index("--") + 1 :] for command in commands(page) if "--" in command]
    return [command[1:] for command in [*commands(page), *in_pods] if command[0] == "tandem" and command[1:]]


def own_files(page: Path) -> dict[str, str]:
    """Values files that the page has the reader write: their name, which is their first line, and what is in them."""
    return {block.split("\n")[0].removeprefix("# "): block for block in blocks(page, "yaml")}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", page.read_text())
