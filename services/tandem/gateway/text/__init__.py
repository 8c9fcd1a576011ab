"""The text of one model: its chat template, its tokenizer and vocabulary, and the detokenizer of streamed output.

`text_model.TextModel` turns messages and text into token ids and back; `text_models.TextModels` loads one for each
tokenizer bundle that workers serve. `chat_template` renders a conversation to text, and `detokenizer` turns output
tokens into text as they arrive and cuts it at stop strings. Read `text_model` first."""
