"""Parse and check the bodies of OpenAI's requests, for HTTP and gRPC, and translate them into a `Request` and an
`OutputSpec`.

`request_schema` defines the bodies and parses their JSON. `request_params` checks the values and builds the `Request`
that workers receive; `prompt` reads the prompts of a completion. `output_spec` collects tools, structured output and
reasoning, and derives the output's grammar from them. Read `request_schema` first, then `request_params`.
"""
