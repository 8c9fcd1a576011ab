"""Compile the grammars of new jobs in a thread, one after the other."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tandem.core.grammar import Grammar
from tandem.core.thread_priority import lower_priority
from tandem.runtime.grammar_engine import LlguidanceMasks


class GrammarPreparation:
    """Compile the grammars of jobs before the jobs start, one at a time on a low-priority thread, so that running steps
    share the processors with at most one compilation. `masks`: compiles and caches grammars; None for a model without
    grammar support."""

    def __init__(self, masks: LlguidanceMasks | None) -> None:
        self._masks = masks
        self._thread = ThreadPoolExecutor(1, "tandem-grammar", lower_priority)

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar and return when that is done; return immediately if the grammar is cached. If the caller is
        cancelled while the grammar waits for its turn, the grammar is not compiled."""
        if self._masks is not None and not self._masks.is_prepared(grammar):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._masks.prepare, grammar)

    def close(self) -> None:
        """Cancel the compilations that have not begun, and return without waiting. The thread ends after the running
        compilation."""
        self._thread.shutdown(wait=False, cancel_futures=True)
