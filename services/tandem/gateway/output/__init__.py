"""What the text of one choice means: reasoning, answer, tool calls, and the format it must have.

`text_stream` turns the tokens of a choice into text deltas; `reasoning_parser` and `tool_call_parser` are transforms of
these deltas. `response_format` and `tools` check what a body asks for and write the grammar that the model must
follow."""
