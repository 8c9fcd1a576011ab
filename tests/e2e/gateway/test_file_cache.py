"""Test that a worker's KV files survive its death in the middle of writing, and that damaged ones change no token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.gateway.http import completion, send
from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import Cluster, Gateway, cluster, until
from tests.e2e.gateway.tiny_model import make_model

pytestmark = pytest.mark.timeout(240)

LENGTH = 1500
SALTS = range(6)
"""Prompts that together are more than twice as long as the pool, and than host memory."""


@pytest.fixture
def running(tmp_path: Path, redis_url: str) -> Iterator[Cluster]:
    # A worker reads what takes longer to compute: wide layers keep that so on a busy machine.
    model = make_model(tmp_path / "model", intermediate_size=8192)
    sizes = ("--kv-cache-memory", "4MiB", "--host-cache-memory", "3MiB", "--file-cache-path", str(tmp_path / "files"))
    with cluster(tmp_path, redis_url, model, *SETTINGS, *sizes, "--namespace", tmp_path.name) as running:
        yield running


def complete(gateway: Gateway, salt: int) -> tuple[str, int]:
    """Return the text after a prompt, and how many tokens of the prompt were cached."""
    reply = send(gateway.url, completion(LENGTH, salt, 8)).json()
    return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_files_survive_the_death_of_their_writer_and_damage_is_noticed(running: Cluster, tmp_path: Path) -> None:
    gateway, worker = running.gateway("gateway"), running.worker("one", "mixed")
    running.wait_serving()
    texts = [complete(gateway, salt)[0] for salt in SALTS]
    until(lambda: worker.books().num_file_blocks > 100, "files")
    worker.kill()
    second = running.again(worker)
    running.wait_serving()
    until(lambda: second.books().num_file_blocks > 100, "the files of the first life")
    replies = [complete(gateway, salt) for salt in SALTS]
    assert [text for text, _ in replies] == texts
    assert second.books().num_file_hit_tokens > LENGTH
    assert sum(num_cached for _, num_cached in replies) > LENGTH
    for number, path in enumerate((tmp_path / "files").rglob("*.kv")):
        if number % 2:
            os.truncate(path, path.stat().st_size // 2)
        else:
            content = bytearray(path.read_bytes())
            content[-100] ^= 0x40
            path.write_bytes(content)
    assert [complete(gateway, salt)[0] for salt in SALTS] == texts
    until(second.is_idle, "an idle worker")
    assert second.stop() == 0 and "Traceback" not in second.log
