"""What the text of one choice means: reasoning, answer, tool calls, and the format it must have.

`text_stream` turns a request's tokens into text; `output_parser` splits that text into reasoning, content and tool
calls. `response_format` and `tools` check what a body asks for and write the grammar that the model must follow."""
