"""The HTTP front end: server, limits, routes, OpenAPI document, server-sent events and OpenAI's responses.

Start with `openai_routes`. `protocol_limits` guards connections below the application; `exchange` is one request and
its response over plain ASGI."""
