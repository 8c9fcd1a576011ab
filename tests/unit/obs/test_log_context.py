"""Test the log context: a line names the request that runs, also in tasks that the request starts."""

from __future__ import annotations

import asyncio

from tandem.obs.logs.log_context import in_request, request_fields, traced


def test_nothing_is_known_outside() -> None:
    traced(f"00-{'ab' * 16}-{'cd' * 8}-01")
    assert request_fields() == {}


def test_nothing_is_known_of_one_that_is_over() -> None:
    with in_request("r"):
        assert request_fields() == {"request_id": "r"}
    traced(f"00-{'ab' * 16}-{'cd' * 8}-01")
    assert request_fields() == {}


async def test_each_task_names_its_own_request() -> None:
    both_run = asyncio.Barrier(2)

    async def answer(name: str) -> dict[str, str]:
        with in_request(name):
            await both_run.wait()
            traced(f"00-{name * 16}-{name * 8}-00")
            await both_run.wait()
            return request_fields()

    fields = await asyncio.gather(answer("aa"), answer("bb"))
    assert fields == [{"request_id": x, "trace_id": x * 16, "span_id": x * 8} for x in ("aa", "bb")]


async def test_what_a_request_starts_names_it_only_while_it_is_answered() -> None:
    is_over = asyncio.Event()

    async def helper() -> tuple[dict[str, str], dict[str, str]]:
        during = request_fields()
        await is_over.wait()
        return during, request_fields()

    with in_request("r-1"):
        task = asyncio.create_task(helper())
        await asyncio.sleep(0)
        traced(f"00-{'ab' * 16}-{'cd' * 8}-01")
        assert request_fields() == {"request_id": "r-1", "trace_id": "ab" * 16, "span_id": "cd" * 8}
    is_over.set()
    assert await task == ({"request_id": "r-1"}, {})
