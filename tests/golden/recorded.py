"""Keeps transformers' greedy answers by model and prompt in `answers.json`, so that most tests need not compute them.

`make nightly` computes every answer that a test asks for again and compares. To record the answers of new prompts, run
the golden tests with `TANDEM_RECORD_ANSWERS=1`; answers that no test asks for any more go with
`rm tests/golden/answers.json` before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("answers.json")
IS_RECORDING = os.environ.get("TANDEM_RECORD_ANSWERS") == "1"
_CHUNK_BYTES = 1 << 20

Answers = dict[str, dict[str, list[int]]]


def digest_of_model(directory: Path, dtype: str) -> str:
    """Return a digest of a model's weights, configuration and the type that they are computed in."""
    total = hashlib.sha256(dtype.encode())
    for path in sorted([*directory.glob("*.safetensors"), directory / "config.json"]):
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                total.update(chunk)
    return total.hexdigest()[:16]


def name_of_prompt(prompt: Sequence[int], count: int, parameters: object) -> str:
    """Return the name that `count` tokens after a prompt have in the file; `parameters` change what is greedy."""
    text = f"{list(prompt)} {parameters or ''}"
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{count}"


@cache
def _answers() -> Answers:
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def recorded(model: str, prompt: str) -> list[int] | None:
    """Return the tokens that transformers answered, or None where nobody has recorded them."""
    return _answers().get(model, {}).get(prompt)


def record(model: str, prompt: str, tokens: Sequence[int]) -> None:
    """Write an answer to the file when answers are being recorded."""
    if IS_RECORDING and recorded(model, prompt) is None:
        _answers().setdefault(model, {})[prompt] = list(tokens)
        rows = [
            f"  {json.dumps(name)}: {{\n"
            + ",\n".join(f"    {json.dumps(key)}: {json.dumps(found)}" for key, found in sorted(of_model.items()))
            + "\n  }"
            for name, of_model in sorted(_answers().items())
        ]
        PATH.write_text("{\n" + ",\n".join(rows) + "\n}\n")
