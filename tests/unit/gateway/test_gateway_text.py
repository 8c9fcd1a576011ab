"""Test templates and token ids against transformers, and the sampling defaults and end tokens of a bundle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.core.bundle import TokenizerBundle
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.text.text_model import SamplingDefaults, TextModel, TextTooLong

Make = Callable[..., TextModel]

LLAMA3 = (
    "{{- bos_token }}\n{%- if messages[0]['role'] == 'system' %}\n    {%- set system = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
    "{{- '<|im_start|>system\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n' + system + '<|im_end|>' }}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n\\n' }}\n{%- endif %}\n"
)
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = (
    "{%- if tools %}\n    {{- tools | tojson }}\n{%- elif messages[0].role == 'system' %}\n"
    "    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- set ns = namespace(last=messages|length - 1) %}\n{%- for message in messages[::-1] %}\n"
    "    {%- if message.role == 'user' %}\n        {%- set ns.last = messages|length - 1 - loop.index0 %}\n"
    "        {%- break %}\n    {%- endif %}\n{%- endfor %}\n{%- for message in messages %}\n"
    "    {%- if message.role != 'system' %}\n"
    "        {{- '<|im_start|>' + message.role + ('*' if loop.index0 == ns.last else '') + '\\n' + message.content"
    " + ({'name': message.name, 'x': '<&ü>'} | tojson if message.name is defined else '') + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in 你好 and 😀."},
        {"role": "user", "content": "  leading,\ttabs\n\n\nlines   and 0123456789  "},
    ],
    [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "Grüße <|im_end|> aus"},
        {"role": "user", "content": "<s> c", "name": "Zoë"},
    ],
]


TEMPLATES = {"llama3": LLAMA3, "smollm2": SMOLLM2, "qwen": QWEN, "llama2": LLAMA2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chat"),
    # This Llama 2 template accepts no system message.
    [(name, index) for name in TEMPLATES for index in range(len(CHATS)) if (name, index) != ("llama2", 1)],
)
def test_token_ids_are_those_of_transformers(make_text: Make, tokenizer: Tokenizer, name: str, chat: int) -> None:
    variables = {"enable_thinking": False}
    mine = make_text(TEMPLATES[name]).encode_chat(CHATS[chat], variables)
    assert list(mine) == reference(tokenizer, TEMPLATES[name], CHATS[chat], add_generation_prompt=True, **variables)
    assert mine[:2] != (0, 0)


def reference(tokenizer: Tokenizer, template: str, chat: list[dict[str, Any]], **options: bool) -> Any:
    """Return the token ids that transformers makes of a chat."""
    from transformers import PreTrainedTokenizerFast

    copy = Tokenizer.from_str(tokenizer.to_str())
    theirs = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=copy, bos_token="<s>", eos_token="<|im_end|>", chat_template=template
    )
    return theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **options)


def test_a_template_that_writes_bos_does_not_double_it(make_text: Make) -> None:
    ids = make_text(LLAMA3).encode_chat(CHATS[0])
    assert ids[0] == 0
    assert ids.count(0) == 1


def test_the_clock_of_templates_is_given_from_outside(make_text: Make, tokenizer: Tokenizer) -> None:
    day = 86400 * 10**9
    text = make_text(LLAMA3, now_ns=lambda: 9000 * day + day // 2)
    assert "Today: 23 Aug 1994" in tokenizer.decode(text.encode_chat(CHATS[0]))


def test_the_templates_own_system_prompt_is_kept(make_text: Make, tokenizer: Tokenizer) -> None:
    assert "named SmolLM" in tokenizer.decode(make_text(SMOLLM2).encode_chat(CHATS[0]))
    assert "named SmolLM" not in tokenizer.decode(make_text(SMOLLM2).encode_chat(CHATS[1]))


@pytest.mark.parametrize("role", ["developer", "system"])
def test_developer_is_system_where_the_template_does_not_know_it(make_text: Make, role: str) -> None:
    chat = [{"role": role, "content": "x"}, {"role": "user", "content": "y"}]
    system = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    assert make_text(SMOLLM2).encode_chat(chat) == make_text(SMOLLM2).encode_chat(system)
    aware = make_text("{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %}{% endfor %}")
    assert (aware.encode_chat(chat) == aware.encode_chat(system)) == (role == "system")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", "no chat template"),
        ("{% for %}", "does not compile"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ none + 'x' }}", "cannot render"),
        ("{{ messages.nothing.more }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(999999999) %}x{% endfor %}", "cannot render"),
    ],
)
def test_template_failures_are_invalid_requests(make_text: Make, template: str, expected: str) -> None:
    with pytest.raises(TandemError, match=expected) as caught:
        make_text(template).encode_chat(CHATS[0])
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert caught.value.param == "messages"


def test_a_request_cannot_replace_the_conversation(make_text: Make) -> None:
    with pytest.raises(TandemError, match="must not set messages"):
        make_text().encode_chat(CHATS[0], {"messages": []})


@pytest.mark.parametrize(
    ("special", "text", "expected"),
    [
        ({}, "x", [0]),
        ({}, "<s>x", [0]),
        ({"add_bos_token": True}, "x", [0]),
        ({"add_bos_token": True}, "<s>x", [0]),
        ({"add_bos_token": False}, "x", []),
        ({"add_bos_token": None}, "x", [0]),
        ({"bos_token_id": None}, "<s>x", [0, 0]),
    ],
)
def test_bos_of_plain_text(
    make_text: Make, tokenizer: Tokenizer, special: dict[str, Any], text: str, expected: list[int]
) -> None:
    body = tokenizer.encode("x", add_special_tokens=False).ids
    assert list(make_text(special=special).encode(text).ids) == expected + body


def test_eos_of_plain_text_where_the_model_requires_one(make_text: Make) -> None:
    assert make_text(special={"add_eos_token": True}).encode("x").ids[-1] == 1


def test_the_end_tokens_are_the_union_of_both_files(make_text: Make) -> None:
    text = make_text(special={"eos_token_ids": [1]}, config={"eos_token_id": [2, 1]})
    assert text.eos_token_ids == {1, 2}
    assert make_text(special={"eos_token_ids": None}, config={"eos_token_id": 7}).eos_token_ids == {7}
    assert make_text(config={"eos_token_id": 2}, generation_config="none").eos_token_ids == {1, 2}


def test_sampling_defaults(make_text: Make) -> None:
    config = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": None, "repetition_penalty": 1.05, "num_beams": 4}
    text = make_text(config=config)
    assert text.defaults == SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    assert text.unserved_defaults == ("num_beams",)
    off = make_text(config=config, generation_config="none")
    assert off.defaults == SamplingDefaults()
    assert off.unserved_defaults == ()


def test_special_tokens_may_be_objects(make_text: Make, tokenizer: Tokenizer) -> None:
    text = make_text("{{ bos_token }}{{ messages[0].content }}", special={"bos_token": {"content": "<s>"}})
    assert tokenizer.decode(text.encode_chat(CHATS[0]), skip_special_tokens=False).startswith("<s>What")


def test_truncation_and_padding_of_the_file_are_ignored(tokenizer: Tokenizer) -> None:
    cut = Tokenizer.from_str(tokenizer.to_str())
    cut.enable_truncation(2)
    cut.enable_padding(length=8)
    ids = TextModel(TokenizerBundle(tokenizer_json=cut.to_str().encode())).encode("The capital of France").ids
    assert list(ids) == tokenizer.encode("The capital of France").ids


@pytest.mark.parametrize(
    "broken",
    [
        {"tokenizer_json": b"{}"},
        {"tokenizer_json": b"\xff"},
        {"generation_config_json": "{"},
        {"special_tokens_json": "[1]"},
    ],
)
def test_a_broken_bundle_is_refused_with_the_reason(tokenizer: Tokenizer, broken: dict[str, Any]) -> None:
    parts = {"tokenizer_json": tokenizer.to_str().encode()} | broken
    with pytest.raises(TandemError) as caught:
        TextModel(TokenizerBundle(**parts))
    assert caught.value.kind is ErrorKind.INTERNAL


def test_the_digest_depends_on_every_part() -> None:
    base: dict[str, Any] = {
        "tokenizer_json": b"a",
        "chat_template": "b",
        "generation_config_json": "c",
        "special_tokens_json": "d",
    }
    shifted = base | {"chat_template": "bc", "generation_config_json": ""}
    changed = [base | {name: value * 2} for name, value in base.items()]
    digests = {TokenizerBundle(**parts).digest for parts in [base, shifted, *changed]}
    assert len(digests) == 6


def test_tokens_of_a_byte_level_vocabulary(make_text: Make, tokenizer: Tokenizer) -> None:
    text = make_text()
    ids = tokenizer.encode(" the 你好😀é\n", add_special_tokens=False).ids
    assert b"".join(text.token_text(token).raw for token in ids) == " the 你好😀é\n".encode()
    every_byte = "".join(map(chr, range(0x80, 0x100)))  # with the lead bytes C2 and C3, in two-byte characters
    ids = tokenizer.encode(every_byte, add_special_tokens=False).ids
    assert b"".join(text.token_text(token).raw for token in ids) == every_byte.encode()
    assert text.token_text(1).text == "<|im_end|>"
    assert text.token_text(10**6).raw == b""


class CountedTokenizer:
    """Count the characters that a tokenizer encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_chars = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("method", ["encode", "encode_chat"])
def test_a_text_that_cannot_fit_is_refused_at_the_cost_of_its_beginning(
    make_text: Callable[..., TextModel], method: str
) -> None:
    model, text = make_text(), "7" * 4_000_000
    counted = model._tokenizer = CountedTokenizer(model._tokenizer)  # type: ignore[assignment]
    with pytest.raises(TextTooLong) as refused:
        getattr(model, method)(text if method == "encode" else [{"role": "user", "content": text}], max_tokens=10_000)
    assert refused.value.max_tokens == 10_000
    assert counted.num_chars < 100_000


@pytest.mark.parametrize("piece", ["Paris is the capital. ", "7", " ", "größer 中国 😀\n"])
def test_a_text_that_fits_is_encoded_as_without_a_limit(make_text: Callable[..., TextModel], piece: str) -> None:
    model = make_text()
    text = piece * (100_000 // len(piece))
    ids = model.encode(text).ids
    assert model.encode(text, max_tokens=len(ids)).ids == ids
    assert model.encode(text, max_tokens=len(text)).ids == ids
