"""Run one workload with transformers' `generate` and record the time of every step.

    python transformers_batch.py MODEL WORKLOAD.json RECORDS.json --threads N [--continuous]

Runs in a peer's environment, so it imports nothing of Tandem. Requests run one at a time or, where all are due at once,
as one static batch, whose prompts must have one length; `--continuous` uses continuous batching instead, which reports
only the total time.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import StoppingCriteria, StoppingCriteriaList


class Stamps(StoppingCriteria):
    """Record the time after each token of a batch; as a stopping criterion it stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("workload", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--continuous", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    requests = json.loads(args.workload.read_text())
    batches = [[request] for request in requests["requests"]] if requests["is_sequential"] else [requests["requests"]]
    run = _continuous if args.continuous else _static
    run(model, [requests["warm_up"]], 0.0)
    began = time.monotonic()
    records = [record for batch in batches for record in run(model, batch, began)]
    wall_s = time.monotonic() - began
    args.records.write_text(json.dumps({"records": records, "wall_s": wall_s}))


@torch.inference_mode()
def _static(model: Any, requests: list[dict[str, Any]], began: float) -> list[dict[str, Any]]:
    prompts = torch.tensor([request["prompt"] for request in requests])
    stamps, sent = Stamps(), time.monotonic() - began
    config = GenerationConfig(
        do_sample=False, max_new_tokens=requests[0]["max_tokens"], eos_token_id=None, pad_token_id=0
    )
    rows = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([stamps]),
    )
    times = [at - began for at in stamps.times]
    start = prompts.shape[1]
    return [_record(request, sent, times, row[start:].tolist()) for request, row in zip(requests, rows, strict=True)]


def _continuous(model: Any, requests: list[dict[str, Any]], began: float) -> list[dict[str, Any]]:
    sent = time.monotonic() - began
    config = GenerationConfig(
        do_sample=False, max_new_tokens=requests[0]["max_tokens"], eos_token_id=-1, pad_token_id=0
    )
    outputs = model.generate_batch(inputs=[request["prompt"] for request in requests], generation_config=config)
    end = time.monotonic() - began
    in_order = [outputs[key] for key in sorted(outputs, key=lambda key: int(key.rsplit("_", 1)[-1]))]
    return [
        _record(request, sent, [end], list(out.generated_tokens))
        for request, out in zip(requests, in_order, strict=True)
    ]


def _record(request: dict[str, Any], sent: float, times: list[float], tokens: list[int]) -> dict[str, Any]:
    error = "" if len(tokens) == request["max_tokens"] else f"{len(tokens)} of {request['max_tokens']} tokens"
    return {
        "name": request["name"],
        "group": request["group"],
        "num_prompt_tokens": len(request["prompt"]),
        "num_requested_tokens": request["max_tokens"],
        "due_s": sent,
        "sent_s": sent,
        "stamps_s": times,
        "tokens": tokens,
        "num_output_tokens": len(tokens),
        "finish_reason": "length",
        "error": error,
    }


if __name__ == "__main__":
    main()
