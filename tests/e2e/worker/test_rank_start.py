"""Test ranks that fail to start: the first rank reports a typed reason, and no process hangs or is left."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.core.config import Bytes, Config, EngineConfig, ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.worker.model.worker_model import load_worker_model
from tandem.worker.ranks.local_rank import RankChild
from tandem.worker.ranks.rank_group import Launch
from tandem.worker.ranks.shared_settings import shared_settings
from tests.e2e.cluster import spawn

pytestmark = pytest.mark.timeout(120)

# A rank that is gone once it has said that it is there.
_VANISH = """
import json, socket, sys
from tandem.engine.rank_messages import RankReady
from tandem.wire.rank_codec import RANK_EVENTS
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
word = RANK_EVENTS.encode(RankReady(int(sys.argv[2]), json.loads(sys.argv[3])))
line.sendall(len(word).to_bytes(4, "big") + word)
line.recv(1)
"""


class _Vanishing:
    def __init__(self, config: Config, address: str, rank: int) -> None:
        shared = json.dumps(shared_settings(config))
        self._process = spawn(sys.executable, "-c", _VANISH, address, str(rank), shared)

    def ended(self) -> str | None:
        return None

    def stop(self, timeout_s: float) -> None:
        assert self._process.wait(timeout_s) == 0


@pytest.fixture
def config(tiny_directory: Path) -> Config:
    engine = EngineConfig(tensor_parallel=2, kv_cache_memory=Bytes(1 << 20), num_threads=1)
    return Config(model=ModelConfig(id=str(tiny_directory), dtype="float64"), engine=engine)


def launches(made: list[Any], config: Config) -> Launch:
    def launch(address: str, rank: int) -> RankChild:
        made.append(RankChild(config, address, rank))
        return made[-1]

    return launch


def test_a_rank_that_cannot_load_reports_the_reason(config: Config, tmp_path: Path) -> None:
    made: list[RankChild] = []
    elsewhere = replace(config, model=replace(config.model, id=str(tmp_path / "none")))
    with pytest.raises(TandemError, match=r"rank 1: .*none") as caught:
        load_worker_model(config, launches(made, elsewhere))
    assert caught.value.kind is ErrorKind.MODEL_NOT_FOUND
    assert made[0].ended() is not None


def test_a_rank_that_is_gone_before_they_meet(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.model.worker_model.JOIN_S", 1.0)
    with pytest.raises(TandemError, match="rank 1 is gone") as caught:
        load_worker_model(config, partial(_Vanishing, config))
    assert caught.value.kind is ErrorKind.WORKER_LOST
