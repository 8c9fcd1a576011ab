"""Create the virtual environment of a peer once."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.peers.catalog import PEERS, Peer, home, python_of

# Runs in the peer's environment, which alone knows what was installed.
_LIST_REQUIREMENTS = "import importlib.metadata as m, sys; print(*(m.requires(sys.argv[1]) or ()), sep='\\n')"


def install(name: str) -> None:
    """Install a peer unless it is installed. Raises KeyError for an unknown name, CalledProcessError when a step
    fails."""
    peer, place = PEERS[name], home(name)
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    if peer.without:
        _install_without(peer)
    else:
        _pip(name, peer.requirements)
    peer.finish(place)
    (place / "installed").touch()


def _install_without(peer: Peer) -> None:
    *first, last = peer.requirements
    for requirement in first:
        _pip(peer.name, [requirement])
    _pip(peer.name, ["--no-deps", last])
    required = required_requirements(_declared(peer.name, last), peer.without)
    if required:
        _pip(peer.name, required)


def _declared(name: str, requirement: str) -> list[str]:
    package = re.split(r"[=<>~!\[ ]", requirement)[0]
    command = [python_of(name), "-c", _LIST_REQUIREMENTS, package]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")


def required_requirements(declared: Sequence[str], without: Sequence[str]) -> list[str]:
    """Return those requirements of `declared` that belong to no extra and whose names are not in `without`."""
    required = []
    for line in declared:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name and "extra ==" not in line and name.group().lower() not in without:
            required.append(line)
    return required


def _pip(name: str, requirements: Sequence[str | Path]) -> None:
    subprocess.run([python_of(name), "-m", "pip", "install", "--quiet", *requirements], check=True)
