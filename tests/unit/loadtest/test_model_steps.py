"""Steps of a whole model: plans that an executor takes, floors that are the design's, and a report of what fits."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loadtest.__main__ import main
from loadtest.engine import model_steps
from loadtest.engine.step_floor import Rates, chunk_work, decode_work, floor_s
from loadtest.engine.step_plans import Decode, PlannedChunk, Unfit, fill, plans_of, tables_of, time_steps
from tandem.core.clock import SystemClock
from tandem.core.config import Bytes, EngineConfig, ModelConfig
from tandem.core.model_catalog import PUBLISHED, ModelSpec
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.executor import TorchExecutor
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_config import parse_model_config, read_model_config
from tandem.runtime.model_loader import load_executor
from tandem.runtime.model_store import resolve_model
from tandem.runtime.models.decoder import Decoder
from tandem.runtime.random_weights import open_weights
from tandem.sched.state.step_plan import StepPlan, StepResult

H200 = Rates(memory=4.3e12, matrix=788e12)
TINY = ModelSpec(
    {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 200,
        "tie_word_embeddings": True,
    },
    "made up",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `random:tiny` is made."""
    monkeypatch.setattr("tandem.runtime.random_model.PUBLISHED", {"tiny": TINY})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def executor(cache: Path) -> TorchExecutor:
    directory = resolve_model("random:tiny", cache)
    engine = EngineConfig(num_threads=1, kv_cache_memory=Bytes(1 << 20), kernels="reference")
    return load_executor(directory, read_model_config(directory), ModelConfig(id="random:tiny"), engine)


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 3.52), (32, 4.49), (256, 12.87)])
def test_the_floor_of_a_decode_is_the_design_s(batch: int, milliseconds: float) -> None:
    config = parse_model_config(PUBLISHED["llama-3.1-8b"].config)
    assert floor_s(config, 2, 131_072, H200, decode_work(batch, 1024)) * 1e3 == pytest.approx(milliseconds, abs=0.01)


@pytest.mark.parametrize(("rows", "milliseconds"), [(2048, 37.7), (8192, 167.4)])
def test_the_floor_of_a_prompt_is_the_design_s(rows: int, milliseconds: float) -> None:
    config = parse_model_config(PUBLISHED["llama-3.1-8b"].config)
    assert floor_s(config, 2, 131_072, H200, chunk_work(rows, 0)) * 1e3 == pytest.approx(milliseconds, abs=0.1)


def test_a_chunk_s_pairs_are_those_of_its_rows() -> None:
    assert chunk_work(3, 5).pairs == 6 + 7 + 8 and chunk_work(3, 5).context == 8


@pytest.mark.parametrize(
    "case", [Decode(3, 20), Decode(1, 1), Decode(2, 16), PlannedChunk(10, 0), PlannedChunk(5, 17)], ids=str
)
def test_an_executor_computes_the_work_of_a_case(case: Decode | PlannedChunk, executor: TorchExecutor) -> None:
    steps = 4
    tables = tables_of(case, steps, executor.layout, executor.num_blocks)
    used = [block for table in tables for block in table]
    assert len(set(used)) == len(used)
    plans = list(plans_of(case, 1, steps, tables, executor.vocab_size))
    assert all(plan.num_tokens == case.num_tokens for plan in plans)
    context = sum(piece.stop for piece in plans[0].slices)
    assert context == case.work.context
    for plan in plans:
        result = executor.execute(plan)
        assert all(piece.error is None for piece in result.slices)
        assert all(len(piece.tokens) == case.work.sampled / len(plan.slices) for piece in result.slices)


def test_a_case_that_does_not_fit_is_reported() -> None:
    layout = KVLayout(16, (KVGroup(2, 2, 8, "float32"),))
    assert len(tables_of(Decode(2, 16), 1, layout, 2)) == 2
    with pytest.raises(Unfit, match="needs 4 blocks of KV, the pool has 3"):
        tables_of(Decode(2, 16), 2, layout, 3)


class Pipe:
    """An executor with launch and collect, which remembers how many plans were open."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self._open: deque[StepPlan] = deque()
        self.most_open = 0
        self.layout, self.num_blocks, self.num_host_slots = executor.layout, executor.num_blocks, 0
        self.vocab_size = executor.vocab_size

    def execute(self, plan: StepPlan) -> StepResult:
        raise AssertionError("it can do better")

    def launch(self, plan: StepPlan) -> None:
        self._open.append(plan)
        self.most_open = max(self.most_open, len(self._open))

    def collect(self) -> StepResult:
        return self._executor.execute(self._open.popleft())


def plans_for(executor: TorchExecutor, case: Decode, num_steps: int) -> Iterator[StepPlan]:
    tables = tables_of(case, num_steps, executor.layout, executor.num_blocks)
    return plans_of(case, 1, num_steps, tables, executor.vocab_size)


def test_a_pipelined_executor_has_the_next_plan_while_one_runs(executor: TorchExecutor) -> None:
    pipe = Pipe(executor)
    seconds = time_steps(pipe, plans_for(executor, Decode(2, 5), 5), SystemClock())
    assert len(seconds) == 5 and pipe.most_open == 2
    assert time_steps(pipe, iter(()), SystemClock()) == []


def test_times_of_a_pipeline_are_from_end_to_end(executor: TorchExecutor) -> None:
    """On a clock that each step moves by a second, whenever its launch or its collection computes it."""

    class Ticking:
        time = 0.0

        def now(self) -> float:
            return self.time

    clock = Ticking()

    class Late(Pipe):
        def collect(self) -> StepResult:
            clock.time += 1.0
            return super().collect()

    class Early(Pipe):
        def launch(self, plan: StepPlan) -> None:
            clock.time += 1.0
            super().launch(plan)

    for pipe in (Late(executor), Early(executor)):
        seconds = time_steps(pipe, plans_for(executor, Decode(1, 5), 5), clock)
        assert sum(seconds) == 5.0 and seconds[1:-1] == [1.0] * 3


def test_a_step_that_fails_ends_the_measurement(executor: TorchExecutor) -> None:
    for one in (executor, Pipe(executor)):
        with pytest.raises(RuntimeError, match="beyond the model's 200 tokens"):
            time_steps(one, plans_for(executor, Decode(1, 500), 1), SystemClock())


def test_pools_are_filled_with_numbers() -> None:
    pool = torch.zeros(3, 4, 5)
    fill(pool)
    assert bool((pool != 0).all())
    scaled = torch.zeros(8, dtype=torch.uint8)
    fill(scaled)
    assert not scaled.any()


@pytest.mark.nightly
def test_the_command_prints_every_case(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_steps, "measure_rates", lambda device, dtype: Rates(1e9, 1e9))
    sizes = ["--batches", "1,3", "--contexts", "20,400", "--chunks", "8", "--cached", "0,9", "--steps", "4"]
    file = cache / "steps.json"
    argv = ["model", "--shape", "tiny", "--threads", "1", "--kv-gib", "0.001", "--json", str(file), *sizes]
    assert main(argv) == 0
    printed = json.loads(file.read_text())
    cases = [row["case"] for row in printed["rows"]]
    assert cases == ["decode 1 x 20", "decode 3 x 20", "prefill 8 on 0", "prefill 8 on 9"]
    assert [row["steps"] for row in printed["rows"]] == [4, 4, 6, 6]
    for row in printed["rows"]:
        assert 0 < row["low_s"] <= row["median_s"] <= row["high_s"]
        assert row["share"] == row["floor_s"] / row["median_s"] and row["tokens_s"] > 0
    assert set(printed["left_out"]) == {"decode 1 x 400 (as served)", "decode 3 x 400 (as served)"}
    printed = capsys.readouterr().out
    assert "| decode 3 x 20 | as served |" in printed and "left out: decode 1 x 400" in printed


@pytest.mark.nightly
def test_limits_of_this_machine_are_numbers() -> None:
    rates = model_steps.measure_rates(torch.device("cpu"), torch.float32)
    assert rates.memory > 0 and rates.matrix > 0


def test_an_unknown_shape_is_named(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "--shape", "gpt-5"]) == 2
    assert "random:gpt-5" in capsys.readouterr().err


@pytest.mark.slow
def test_figures_are_of_the_requested_device(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never of another one without a word."""
    monkeypatch.setattr(model_steps, "measure_rates", lambda device, dtype: Rates(1e9, 1e9))
    monkeypatch.setattr(model_steps, "describe", lambda device, command: {})
    monkeypatch.setattr("tandem.runtime.model_loader.load_executor", lambda *_: _on_the_cpu(cache))
    assert main(["model", "--shape", "tiny", "--device", "cuda", "--batches", "1", "--contexts", "8"]) == 2
    assert "KV is on cpu" in capsys.readouterr().err


def _on_the_cpu(cache: Path) -> TorchExecutor:
    directory = resolve_model("random:tiny", cache)
    weights = open_weights(directory, torch.float32)
    config = read_model_config(directory)
    layout = KVLayout(16, (KVGroup(config.num_layers, config.kv_heads, config.head_dim, "float32"),))
    return TorchExecutor(Decoder(config, weights), KVCache(layout, 4), 50)
