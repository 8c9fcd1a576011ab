"""Test chats whose last message is continued or closed against transformers, and the text offsets of echoed tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tandem.core.errors import TandemError
from tandem.gateway.openai.prompt import Prompt, encode
from tandem.gateway.serving.echo import echo_deltas
from tandem.gateway.text.chat_template import GenerationPrompt
from tandem.gateway.text.text_model import TextModel
from tests.unit.gateway.test_gateway_text import LLAMA3, QWEN, SMOLLM2, reference

Make = Callable[..., TextModel]
USER = {"role": "user", "content": "What is the capital of France?"}
STARTS = ["It is Par", "It is ", "  It\n is", "", "😀 Grüße\n\n"]


@pytest.mark.slow
@pytest.mark.parametrize("template", [LLAMA3, SMOLLM2, QWEN], ids=["llama3", "smollm2", "qwen"])
@pytest.mark.parametrize("start", STARTS)
def test_a_continued_message_renders_as_in_transformers(
    make_text: Make, tokenizer: Tokenizer, template: str, start: str
) -> None:
    """The result also agrees where the template trims messages, which removes the blanks at the end of this one."""
    chat = [USER, {"role": "assistant", "content": start}]
    mine = make_text(template).encode_chat(chat, ending=GenerationPrompt.OPEN)
    assert list(mine) == reference(tokenizer, template, chat, continue_final_message=True)


@pytest.mark.slow
@pytest.mark.parametrize("template", [LLAMA3, SMOLLM2, QWEN], ids=["llama3", "smollm2", "qwen"])
def test_a_closed_chat_renders_as_in_transformers(make_text: Make, tokenizer: Tokenizer, template: str) -> None:
    mine = make_text(template).encode_chat([USER], ending=GenerationPrompt.CLOSED)
    assert list(mine) == reference(tokenizer, template, [USER], add_generation_prompt=False)


def test_a_template_that_hides_the_last_message_cannot_continue_it(make_text: Make) -> None:
    chat = [USER, {"role": "assistant", "content": "x"}]
    with pytest.raises(TandemError) as caught:
        make_text("{{ messages[0].content }}").encode_chat(chat, ending=GenerationPrompt.OPEN)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "special",
    [{}, {"add_bos_token": True}, {"add_eos_token": True}, {"add_bos_token": True, "add_eos_token": True}],
    ids=str,
)
def test_an_echo_is_the_text_that_was_written(make_text: Make, special: dict[str, Any]) -> None:
    """The echo is the written text whatever the tokenizer adds, and each token begins where the text before it ends."""
    model = make_text(special=special)

    @given(text=st.text(min_size=1, max_size=30))
    def run(text: str) -> None:
        prompt = encode(text, model, 1000, add_special_tokens=True, with_offsets=True)
        deltas = list(echo_deltas(prompt, model, (), 0, skip_special_tokens=True))
        assert "".join(delta.text for delta in deltas) == text
        assert [delta.token.id for delta in deltas if delta.token] == list(prompt.ids) == list(model.encode(text).ids)
        offsets = [delta.offset for delta in deltas]
        assert offsets == sorted(offsets) and offsets[0] == 0
        assert all(text[delta.offset :].startswith(delta.text) for delta in deltas)

    run()


def test_an_echo_of_token_ids_is_their_text(make_text: Make) -> None:
    model = make_text()

    @given(ids=st.lists(st.integers(0, 419), min_size=1, max_size=30))
    def run(ids: list[int]) -> None:
        deltas = list(echo_deltas(Prompt(tuple(ids)), model, (), 0, skip_special_tokens=False))
        assert "".join(delta.text for delta in deltas) == model.decode(ids)
        assert len(deltas) == len(ids)

    run()
