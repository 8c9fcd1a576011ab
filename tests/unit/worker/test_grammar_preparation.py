"""Test that grammars are compiled one after the other, and that a cached one does not wait for others."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

from tandem.core.grammar import Grammar
from tandem.worker.gateways.grammar_preparation import GrammarPreparation


async def test_one_grammar_is_compiled_at_a_time() -> None:
    gate, begun, known = threading.Event(), list[str](), {"known"}

    def prepare(grammar: Grammar) -> None:
        begun.append(grammar.source)
        gate.wait(20)

    masks = SimpleNamespace(prepare=prepare, is_prepared=lambda grammar: grammar.source in known)
    preparation = GrammarPreparation(masks)  # type: ignore[arg-type]
    first, second, third = (
        asyncio.create_task(preparation.prepare(Grammar("regex", source))) for source in ("one", "two", "three")
    )
    while not begun:
        await asyncio.sleep(0.001)
    await preparation.prepare(Grammar("regex", "known"))
    assert begun == ["one"]
    second.cancel()
    await asyncio.wait({second})
    gate.set()
    await asyncio.gather(first, third)
    assert begun == ["one", "three"], "a caller that has left does not have its grammar compiled"
    preparation.close()
