"""Make a small random model with a small real tokenizer as a directory that any worker can load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tokenizer import TEMPLATE, train_tokenizer

CONTEXT = 16384


def make_model(directory: Path, seed: int = 7, intermediate_size: int = 96) -> Path:
    """A Llama of 4 layers over a byte-level vocabulary. Nothing ends a sequence but its length: random weights would
    do so at random, and the tests would not know how long an answer is."""
    tokenizer = train_tokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Spread logits: near-ties would let two right answers differ.
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "generation_config.json").write_text("{}")
    return directory
