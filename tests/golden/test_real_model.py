"""Test the real model's tokenizer, weights and greedy tokens through the executor against transformers."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.golden.models import Reference, check_equal
from tests.golden.steps import generate

pytestmark = pytest.mark.timeout(600)

NUM_THREADS = 2
_OUTPUTS = 24
_PROMPTS = (
    "Hi",
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    "Erkläre kurz, warum der Himmel blau ist.",
    "今日は天気がいいので、",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    '{"name": "Ada", "born": 1815, "langu',
    "Once upon a time there was a river that " + "wound through hills and past old mills and " * 20,
)
_TEXTS = (
    "12345 67 3.14 1,000,000 0x1F 2024-12-31",
    "  a   b\n\n\n c\t\td   \r\n",
    "你好，世界。日本語のテスト 한국어 테스트",  # noqa: RUF001
    "😀👩‍👩‍👧 🇫🇷 héllo naïve Ünïcödé",
    "I'm we've they'll DON'T 'tis",
    "def f(x):\n    return x ** 2  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "",
)


def test_token_ids_equal_transformers(real: Reference, tokenizer: Tokenizer) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(real.floats)
    for text in _TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=True).ids
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_greedy_tokens_equal_transformers(real: Reference, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(text).ids for text in _PROMPTS]
    expected = [real.greedy(prompt, _OUTPUTS) for prompt in prompts]
    executor = real.executor(num_blocks=128)
    ties = []
    for chunk in (None, 64):
        outputs = generate(executor, prompts, _OUTPUTS, chunk=chunk, chained=True, stagger=1)
        for prompt, tokens, got in zip(prompts, expected, outputs, strict=True):
            ties.append(check_equal(real, executor, prompt, tokens, got))
    found = [str(tie) for tie in ties if tie]
    print(f"{len(found)} near-ties in {len(ties) * _OUTPUTS} tokens", *found, sep="\n")  # noqa: T201
    assert len(found) <= 1


def test_the_import_from_gguf_kept_the_models_mind(real: Reference, tokenizer: Tokenizer) -> None:
    """A wrongly converted tensor, which transformers would load just as we do, babbles."""
    turns = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    (tokens,) = generate(real.executor(), [tokenizer.encode(turns).ids], 8)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"


def test_tokens_do_not_depend_on_company(real: Reference, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(text).ids for text in _PROMPTS[:4]]
    executor = real.executor(num_blocks=128)
    together = generate(executor, prompts, 6)
    alone = [generate(executor, [prompt], 6)[0] for prompt in prompts]
    for prompt, one, other in zip(prompts, alone, together, strict=True):
        check_equal(real, executor, prompt, one, other)
