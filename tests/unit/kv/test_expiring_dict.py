"""Test what an ExpiringDict keeps, and for how long."""

from __future__ import annotations

from tandem.kv.expiring_dict import ExpiringDict


def test_entry_expires_on_time() -> None:
    memory: ExpiringDict[str, int] = ExpiringDict(10.0)
    memory.put("a", 1, 0.0)
    memory.put("b", 2, 5.0)
    memory.forget(9.9)
    assert memory.get("a") == 1 and len(memory) == 2
    memory.forget(10.0)
    assert "a" not in memory and memory.get("a") is None and memory.pop("b") == 2 and memory.pop("b") is None


def test_put_again_restarts_the_time() -> None:
    memory: ExpiringDict[str, int] = ExpiringDict(10.0)
    memory.put("a", 1, 0.0)
    memory.put("b", 1, 1.0)
    memory.put("a", 2, 2.0)
    memory.forget(11.5)
    assert memory.get("a") == 2 and "b" not in memory
