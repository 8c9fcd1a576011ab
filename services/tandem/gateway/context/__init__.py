"""Define what the HTTP and gRPC front ends and the packages behind them share: interfaces, the caller of a request,
rate limits.

`interfaces` defines what a front end calls: the request dispatcher, the stream of a request's output, quotas, keys and
prefixes. `request_context.RequestContext` describes the caller of one request, read from its headers or metadata.
`rate_limits` writes the `x-ratelimit-*` headers, and `supervise.BackgroundLoop` repeats a step in a task, also after
one that raised. Read `interfaces` first.
"""
