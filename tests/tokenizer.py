"""Train the small tokenizer, with a chat template, that tests of text share."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

_SPECIAL = ["<s>", "<|im_end|>", "<|im_start|>"]
_CORPUS = [
    "The capital of France is Paris. The capital of Germany is Berlin.",
    "def main():\n    return 12345 + 67890\n",
    "你好。世界。東京は日本の首都です。",
    "Grüße aus Köln, naïve café, Ελλάδα, Россия, 😀😃🎉👩‍🚀",
]
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer() -> Tokenizer:
    """Return byte-level BPE with all 256 bytes, ids 0 to 2 special, and a post-processor that adds `<s>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer
