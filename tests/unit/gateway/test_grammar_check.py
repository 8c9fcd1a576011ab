"""Test the order, bounds, memory and cancellation of grammar checks, over a compiler that the test holds back."""

from __future__ import annotations

import asyncio

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import MAX_SOURCE_CHARS, Grammar
from tandem.core.ids import TenantId
from tandem.gateway.output.response_format import StructuredOutput
from tandem.gateway.serving import grammar_check as module
from tandem.gateway.serving.grammar_check import GrammarCheck
from tandem.gateway.serving.grammar_process import GrammarProcess, Verdict

A, B, C, D = map(TenantId, "abcd")


class HeldProcess(GrammarProcess):
    """Compile nothing, while `gate` is open; the source says what the verdict is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.compiled: list[str] = []

    async def compile(self, notation: str, source: str) -> Verdict:
        self.compiled.append(source)
        await self.gate.wait()
        if source.startswith("lost"):
            raise TandemError(ErrorKind.OVERLOADED, "lost")
        return Verdict(not source.startswith("bad"), f"{notation} {source}")


def make_check() -> tuple[GrammarCheck, HeldProcess]:
    process = HeldProcess()
    return GrammarCheck(process), process


def regex(source: str) -> StructuredOutput:
    return StructuredOutput(Grammar("regex", source), "guided_regex")


async def start(check: GrammarCheck, source: str, tenant: TenantId = A) -> asyncio.Task[None]:
    task = asyncio.create_task(check.check(regex(source), tenant))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST", 0.0)
    check, process = make_check()
    process.gate.clear()
    tasks = [await start(check, f"a{i}") for i in range(3)]
    tasks += [await start(check, source, tenant) for source, tenant in (("b0", B), ("b1", B), ("c0", C))]
    assert process.compiled == ["a0"] and check.num_waiting == 5
    process.gate.set()
    await asyncio.gather(*tasks)
    assert process.compiled == ["a0", "b0", "c0", "a1", "b1", "a2"] and check.num_waiting == 0


async def test_a_tenant_rests_after_a_compilation_and_others_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST", 1e9)
    monkeypatch.setattr(module, "MAX_REST_S", 0.05)
    check, process = make_check()
    await check.check(regex("a0"), A)
    resting = await start(check, "a1")
    await check.check(regex("b0"), B)
    assert process.compiled == ["a0", "b0"]
    await resting
    assert process.compiled == ["a0", "b0", "a1"]


async def test_verdicts_are_remembered_for_all_tenants_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 2)
    check, process = make_check()
    await check.check(regex("one"), A)
    await check.check(regex("one"), B)
    for tenant in (A, B):
        with pytest.raises(TandemError, match="guided_regex does not compile: regex bad") as caught:
            await check.check(regex("bad"), tenant)
        assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_REQUEST, "guided_regex")
    assert process.compiled == ["one", "bad"]
    await check.check(regex("one"), A)
    await check.check(regex("two"), A)  # "bad" is used longest ago
    with pytest.raises(TandemError):
        await check.check(regex("bad"), A)
    assert process.compiled == ["one", "bad", "two", "bad"]


async def test_a_grammar_that_waits_twice_is_compiled_once() -> None:
    check, process = make_check()
    process.gate.clear()
    tasks = [await start(check, "same", tenant) for tenant in (A, B, A)]
    process.gate.set()
    await asyncio.gather(*tasks)
    assert process.compiled == ["same"]


async def test_a_lost_process_is_no_verdict() -> None:
    check, process = make_check()
    for _ in range(2):
        with pytest.raises(TandemError, match="lost"):
            await check.check(regex("lost"), A)
    assert process.compiled == ["lost", "lost"]


async def test_the_notation_is_part_of_what_is_remembered() -> None:
    check, process = make_check()
    await check.check(regex("a"), A)
    await check.check(StructuredOutput(Grammar("lark", "a"), "guided_grammar"), A)
    assert process.compiled == ["a", "a"]


async def test_a_tenant_that_has_too_many_waiting_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    check, process = make_check()
    process.gate.clear()
    tasks = [await start(check, f"a{i}") for i in range(module.MAX_WAITING_OF_TENANT + 1)]
    with pytest.raises(TandemError, match="your grammars wait") as caught:
        await check.check(regex("more"), A)
    error = caught.value
    assert (error.kind, error.reason, error.retry_after_s) == (ErrorKind.OVERLOADED, "grammars", 1.0)
    tasks.append(await start(check, "b", B))
    monkeypatch.setattr(module, "MAX_WAITING", check.num_waiting)
    with pytest.raises(TandemError, match="too many grammars wait"):
        await check.check(regex("b2"), B)
    tasks.append(await start(check, "c", C))
    monkeypatch.setattr(module, "MAX_WAITING_FIRST", check.num_waiting)
    with pytest.raises(TandemError, match="too many grammars wait") as caught:
        await check.check(regex("d"), D)
    assert (caught.value.kind, caught.value.reason) == (ErrorKind.OVERLOADED, "grammars")
    process.gate.set()
    await asyncio.gather(*tasks)
    assert process.compiled[:4] == ["a0", "b", "c", "a1"]


async def test_a_caller_that_leaves_takes_its_waiting_grammar_along() -> None:
    check, process = make_check()
    process.gate.clear()
    running, waiting, last = [await start(check, source) for source in ("one", "two", "three")]
    waiting.cancel()
    running.cancel()
    await asyncio.wait({waiting, running})
    process.gate.set()
    await last
    assert process.compiled == ["one", "three"]
    await check.check(regex("one"), A)
    assert process.compiled == ["one", "three"], "what was begun is finished and remembered"


async def test_gbnf_is_replaced_by_lark() -> None:
    check, process = make_check()
    given = StructuredOutput(Grammar("lark", "root ::= x"), "guided_grammar", is_gbnf=True)
    assert await check.in_lark(given, A) == StructuredOutput(Grammar("lark", "gbnf root ::= x"), "guided_grammar")
    assert await check.in_lark(regex("a"), A) == regex("a")
    assert process.compiled == ["root ::= x"]
    with pytest.raises(TandemError, match="guided_grammar does not compile: gbnf bad"):
        await check.in_lark(StructuredOutput(Grammar("lark", "bad"), "guided_grammar", is_gbnf=True), A)


async def test_a_source_that_is_too_long_is_not_compiled() -> None:
    check, process = make_check()
    with pytest.raises(TandemError, match=f"at most {MAX_SOURCE_CHARS} characters, has {MAX_SOURCE_CHARS + 1}"):
        await check.check(regex("a" * (MAX_SOURCE_CHARS + 1)), A)
    assert not process.compiled


async def test_a_stop_ends_what_is_compiled_for_nobody() -> None:
    check, process = make_check()
    process.gate.clear()
    task = await start(check, "one")
    task.cancel()
    await asyncio.wait({task})
    await check.stop()
    assert process.compiled == ["one"] and asyncio.all_tasks() == {asyncio.current_task()}
