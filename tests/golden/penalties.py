"""Compute sampling parameters with transformers' own processors in our order, and the two missing ones in torch."""

from __future__ import annotations

import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tandem.core.request import SamplingParams


class OutputPenalties(LogitsProcessor):
    """Presence and frequency as OpenAI's documentation has them: of the output alone."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length = prompt_length
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out = scores.clone()
        for row, ids in zip(out, input_ids[:, self.prompt_length :].tolist(), strict=True):
            for token in set(ids):
                row[token] -= self.presence + self.frequency * ids.count(token)
        return out


def parameters_of(sampling: SamplingParams) -> tuple[object, ...]:
    """Return what of `sampling` changes logits, in an order that does not change."""
    stops = tuple(sorted(sampling.stop_token_ids)) if sampling.min_tokens else ()
    return (
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.logit_bias,
        sampling.min_tokens,
        stops,
    )


def processors(sampling: SamplingParams, prompt_length: int) -> list[LogitsProcessor]:
    """Those that `sampling` asks for."""
    out: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1:
        out.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        out.append(OutputPenalties(prompt_length, sampling.presence_penalty, sampling.frequency_penalty))
    if sampling.logit_bias:
        out.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias]))
    if sampling.min_tokens:
        stops = sorted(sampling.stop_token_ids)
        out.append(MinNewTokensLengthLogitsProcessor(prompt_length, sampling.min_tokens, stops))
    return out
