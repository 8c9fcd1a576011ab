"""Text of one model: chat template, tokenizer, vocabulary and incremental detokenizer.

Start with `text_model.TextModel`, which turns messages and text into token ids and back.
"""
