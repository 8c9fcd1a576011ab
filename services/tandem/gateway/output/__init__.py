"""Turn the tokens of one choice into what a client sees (reasoning, answer and tool calls), in the format that a body
requests.

`text_stream.ChoiceText` turns the tokens of a choice into text deltas; `reasoning_parser` and `tool_call_parser` are
transforms that split these deltas. `response_format` and `tools` check what a body requests, `tool_formats` describes
how model families write tool calls, and `tool_grammar` writes the grammar that constrains an answer. Read `text_stream`
first, then `tool_call_parser`.
"""
