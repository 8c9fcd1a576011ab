"""Bodies of OpenAI's requests: their schema, and their translation into a `Request` and an `OutputSpec`.

Read `request_schema` first, then `request_params`. HTTP and gRPC both use this room.
"""
