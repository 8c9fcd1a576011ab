"""Builds the tokenizer files of a model directory from GGUF metadata; never guesses a pre-tokenizer.

A GGUF file holds vocabulary and merges, and a name for how text is split before merging. Only splits whose definition
is here are built; another name is refused, since a wrong split yields plausible and wrong ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from tandem.runtime.model_config import unsupported

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2}
_GPT2_NAMES = ("gpt-2", "default")
_SMOLLM = "smollm"
# llama.cpp begins text with BOS for these unless the file says otherwise.
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Content by file name: tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    special: dict[str, Any] = {}
    for name, key in _SPECIAL.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        special[name] = None if index is None else tokens[index]
    default_bos = metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", default_bos)) and special["bos_token"] is not None
    tokenizer = build_tokenizer(metadata)
    if adds_bos:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A $B:1",
            special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])],
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
        **special,
    }
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}
    template = metadata.get("tokenizer.chat_template")
    return files | ({"chat_template.jinja": template} if template else {})


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer. Raises TandemError for any other kind."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise unsupported(f"GGUF tokenizer {kind!r} (known: gpt2)")
    if metadata.get("tokenizer.ggml.add_space_prefix") or metadata.get("tokenizer.ggml.add_eos_token"):
        raise unsupported("GGUF tokenizer that adds a space or an end of text")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=_ignores(metadata)))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    marked = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in marked if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in marked if k == _USER_DEFINED])
    return tokenizer


def _ignores(metadata: Mapping[str, Any]) -> bool:
    """Llama 3 takes a word that is in the vocabulary as it is, without merging."""
    return metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT


def _pre_tokenizer(name: str) -> PreTokenizer:
    if name in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == _SMOLLM:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if name not in _SPLITS:
        known = ", ".join((*_GPT2_NAMES, _SMOLLM, *_SPLITS))
        raise unsupported(f"GGUF pre-tokenizer {name!r} (known: {known})")
    split = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
