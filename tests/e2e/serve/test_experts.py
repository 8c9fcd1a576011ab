"""Test `tandem serve` of a mixture of experts in float8: prompts go through both workers, tokens are transformers'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from transformers import Qwen3MoeConfig

from tests.e2e.serve.served import Served, until
from tests.golden.models import SHAPE, Reference, check_greedy, make_random, random_prompt
from tests.golden.stored_formats import write_quantised
from tests.scrape import Scrape
from tests.stored_formats import FP8
from tests.tokenizer import TEMPLATE, train_tokenizer

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

_OUTPUTS = 20
_LENGTHS = (5, 60, 700)


def _models(folder: Path) -> tuple[Reference, Reference]:
    """Return a served model with a tokenizer, and the reference with the same values."""
    tokenizer = train_tokenizer()
    config = Qwen3MoeConfig(
        **SHAPE | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096},
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
    )
    (folder / "plain").mkdir()
    served, values = write_quantised(make_random(config, 5, folder / "plain", "float32"), folder, FP8)
    tokenizer.save(str(served.directory / "tokenizer.json"))
    special = {"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (served.directory / "tokenizer_config.json").write_text(json.dumps(special))
    (served.directory / "chat_template.jinja").write_text(TEMPLATE)
    return served, values


def _scrapes(served: Served) -> list[Scrape]:
    """Return the metrics of both workers."""
    targets = httpx.get(f"{served.url}/metrics/targets").json()
    return [Scrape.of(address) for one in targets for address in one["targets"]]


def _tokens(seen: Sequence[Scrape]) -> tuple[float, float]:
    """Return the tokens that both workers' steps and their experts have computed."""
    steps = ("tandem_step_prefill_tokens_total", "tandem_step_decode_tokens_total")
    of_steps = sum(one.sum(name) for one in seen for name in steps)
    return of_steps, sum(one.sum("tandem_expert_tokens_total") for one in seen)


def test_experts_in_float8_answer_through_both_workers(tmp_path: Path) -> None:
    model, values = _models(tmp_path)
    with Served("--port", "0", "--model", str(model.directory)) as served:
        served.wait_ready()
        name = httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"]
        at_start = _tokens(_scrapes(served))
        for length in _LENGTHS:
            prompt = random_prompt(length, length)
            body = {"model": name, "prompt": prompt, "max_tokens": _OUTPUTS, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{served.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
            assert answer.status_code == 200 and answer.headers["x-tandem-path"] == "remote", answer.text
            check_greedy(values, prompt, answer.json()["choices"][0]["token_ids"])
        num_tokens = sum(_LENGTHS) + len(_LENGTHS) * (_OUTPUTS - 1)
        # A step is observed after its tokens are sent.
        until(lambda: _tokens(_scrapes(served))[0] >= at_start[0] + num_tokens, 10.0)
        seen = _scrapes(served)
        of_steps, of_experts = _tokens(seen)
        assert of_experts - at_start[1] == (of_steps - at_start[0]) * 3 * 2, "two experts in each of three layers"
        assert len(seen) == 2 and all(one.sum("tandem_expert_tokens_total", expert="7") > 0 for one in seen)
