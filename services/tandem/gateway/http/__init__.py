"""The HTTP front end of the gateway: it receives OpenAI-compatible requests and sends their responses.

`server` listens and runs the ASGI application; `protocol_limits` limits what a connection may cost before a request
reaches the application. `routes` ties each handler to a method and a path, and `openapi` documents all routes. The
handlers of `openai_routes` pass parsed bodies to `serving.completions`; `responses` sends the output as one JSON body
or as server-sent events, and `openai_response` formats it. Read `openai_routes` first, then `exchange`, which is one
request and its response over plain ASGI."""
