"""Convert between text and tokens of one model: chat template, tokenizer, vocabulary, and detokenizer of streamed
output.

`text_model.TextModel` turns messages and text into token ids and back; `text_models.TextModels` loads one for each
tokenizer bundle that workers serve. `chat_template` renders a conversation to text, and `detokenizer` turns output
tokens into text as they arrive and cuts it at stop strings. Read `text_model` first.
"""
