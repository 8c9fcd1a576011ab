"""The device of these tests: a GPU where there is one and TANDEM_TEST_DEVICE is not cpu, else the CPU, on which Triton
interprets its kernels."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

_ON_GPU = torch.cuda.is_available() and os.environ.get("TANDEM_TEST_DEVICE") != "cpu"
if not _ON_GPU:
    # Before Triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"


# Triton is made for Linux alone.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _memory_for_others() -> Iterator[None]:
    """Several processes share a GPU, and some tests take many gigabytes of it."""
    yield
    if _ON_GPU:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _products_alike_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has numpy's library multiply. On processors without AVX-512 that adds up in float32 in an order
    which depends on how many rows there are, as no GPU does. In float64, rounded once, it matters no more."""
    if _ON_GPU:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    own = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, added: Any, *how: Any) -> Any:
        if added.data.dtype != np.float32:
            return own(builder, a, b, added, *how)
        wide = interpreter.TensorHandle(added.data.astype(np.float64), tl.float64)
        product = own(builder, a, b, wide, *how)
        return interpreter.TensorHandle(product.data.astype(np.float32), added.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def _language_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter patch Triton's language once for a launch and module. Its own way does that again at each
    call of a function inside a kernel, to no effect, which takes half the time of these tests."""
    if _ON_GPU:
        return
    from triton.runtime import interpreter

    own = interpreter._patch_lang
    patched: set[str] = set()

    def patch_lang(function: Any) -> Any:
        if function.__module__ in patched:
            return interpreter._LangPatchScope()
        patched.add(function.__module__)
        scope = own(function)
        restore = scope.restore

        def end_of_launch() -> None:
            # Calls inside a kernel leave it to the launch to restore the language.
            patched.clear()
            restore()

        scope.restore = end_of_launch
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patch_lang)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if _ON_GPU else "cpu")
