"""Compile grammars that clients wrote, in a process of its own, and report whether each compiles.

Run as `python -m tandem.gateway.output.grammar_compiler PARENT`, with the process id of the gateway. Standard input and
output are a socket, whose other end `grammar_process.GrammarProcess` holds. Each request and each answer is a header of
one byte and the length, then a text in UTF-8. The byte of a request is the index of the grammar's notation in
NOTATIONS, the text is its source. The byte of an answer is 1 for a grammar that compiles, and the text is the grammar
that was converted from GBNF, else empty; otherwise the byte is 0 and the text is the reason.

A compilation cannot be interrupted from outside and may take any time, memory or stack. So the kernel ends the process
when a compilation takes too much, by a signal that shows of what: SIGPROF for processor time, SIGABRT for memory,
SIGSEGV for stack.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import threading

from llguidance import LLMatcher, LLParserLimits

from tandem.core.grammar import (
    JSON_FORM,
    MAX_COMPILE_S,
    MAX_LEXER_STATES,
    MAX_STEP_FUEL,
    MAX_STEP_ITEMS,
    MAX_SYMBOLS,
)

NOTATIONS = ("json_schema", "regex", "lark", "gbnf")
HEADER = struct.Struct("!BI")
PROCESS_NAME = "tandem-grammars"
MAX_MEMORY_BYTES = 256 << 20
"""Limit of the address space; compiling the largest grammars takes a quarter of it."""
STACK_BYTES = 4 << 20
"""Stack of the compiling thread: half of what threads of a worker have, so that no grammar overflows only there."""
NICENESS = 5
"""Niceness of this process, so that the event loops of gateway and workers come first where processors are short."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_LIMITS = LLParserLimits(
    max_grammar_size=MAX_SYMBOLS,
    max_lexer_states=MAX_LEXER_STATES,
    step_max_items=MAX_STEP_ITEMS,
    step_lexer_fuel=MAX_STEP_FUEL,
    verbose_errors=False,
)


def main(parent: int) -> None:
    """Answer requests on standard input until it ends. `parent`: process id of the gateway, with which this process
    ends."""
    _end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when to stop
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def compile_grammar(notation: str, source: str) -> tuple[bool, str]:
    """Compile a grammar, and return whether it compiles and a text: the reason where it does not, otherwise empty.

    `source`: the text of the grammar. `notation`: its notation, one of NOTATIONS. A grammar in GBNF is not compiled but
    converted to Lark: the result is (True, the grammar in Lark), or (False, the reason) where it cannot be converted.
    Whether the grammar in Lark compiles is not checked. Exceptions of the compiler are not raised, but become the
    reason.
    """
    try:
        match notation:
            case "json_schema":
                written = LLMatcher.grammar_from_json_schema(source, overrides=dict(JSON_FORM))  # type: ignore[arg-type]
            case "regex":
                written = LLMatcher.grammar_from_regex(source)
            case "gbnf":
                return True, _lark_of(source)
            case _:
                written = LLMatcher.grammar_from_lark(source)
        reason = LLMatcher.validate_grammar(written, limits=_LIMITS).strip()
    except BaseException as error:  # also the compiler's panics, which are no Exception
        return False, str(error) or type(error).__name__
    return not reason, reason


def _serve() -> None:
    while len(head := sys.stdin.buffer.read(HEADER.size)) == HEADER.size:
        notation, num_bytes = HEADER.unpack(head)
        source = sys.stdin.buffer.read(num_bytes).decode()
        signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)
        is_good, text = compile_grammar(NOTATIONS[notation], source)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = text.encode(errors="replace")
        sys.stdout.buffer.write(HEADER.pack(is_good, len(answer)) + answer)
        sys.stdout.buffer.flush()


def _lark_of(source: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark  # rarely used, so not imported at the top

    return str(any_to_lark(source))


def _end_with(parent: int) -> None:
    """Let the kernel end this process when the thread that started it ends, and name the process."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return
    prctl(_PR_SET_NAME, PROCESS_NAME.encode(), 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit()


if __name__ == "__main__":
    main(int(sys.argv[1]))
