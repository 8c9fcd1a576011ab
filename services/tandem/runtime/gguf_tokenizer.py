"""Build the tokenizer files of a model directory from GGUF metadata.

A GGUF file holds vocabulary and merges, and the name of the pre-tokenizer, which splits text before merging. A
pre-tokenizer that is not defined here is an error, since a wrong split yields plausible but wrong ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from tandem.runtime.architectures.refusal import unsupported

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LIKE_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "dbrx", "glm4", "chatglm-bpe")
_SPLITS = dict.fromkeys(_LIKE_LLAMA3, _LLAMA3) | {"qwen2": _QWEN2}
_GPT2_NAMES = ("gpt-2", "default", "olmo")
_SINGLE_DIGIT_NAMES = ("smollm", "refact")
# llama.cpp begins text with BOS for these pre-tokenizers unless the file sets add_bos_token.
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the content of a model directory's tokenizer files by file name, built from the metadata of a GGUF file.

    The files are tokenizer.json, tokenizer_config.json and, if the metadata has a chat template, chat_template.jinja.
    Raises TandemError for an unsupported tokenizer, and KeyError when a key is missing."""
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
    """Build the byte-level BPE tokenizer that the metadata of a GGUF file describes.

    Raises TandemError for any other kind of tokenizer or an unknown pre-tokenizer, and KeyError when a key is missing,
    such as the one that names the pre-tokenizer: old files lack it, and of most models it is not GPT-2's."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise unsupported(f"GGUF tokenizer {kind!r} (known: gpt2)")
    if metadata.get("tokenizer.ggml.add_space_prefix") or metadata.get("tokenizer.ggml.add_eos_token"):
        raise unsupported("GGUF tokenizer that adds a space or an end of text")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=_ignores_merges(metadata))
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata["tokenizer.ggml.pre"])
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    marked = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in marked if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in marked if k == _USER_DEFINED])
    return tokenizer


def _ignores_merges(metadata: Mapping[str, Any]) -> bool:
    """Return whether a word in the vocabulary is one token regardless of the merges, as for Llama 3."""
    return metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT


def _pre_tokenizer(name: str) -> PreTokenizer:
    if name in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _SINGLE_DIGIT_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if name not in _SPLITS:
        known = ", ".join((*_GPT2_NAMES, *_SINGLE_DIGIT_NAMES, *_SPLITS))
        raise unsupported(f"GGUF pre-tokenizer {name!r} (known: {known})")
    split = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
