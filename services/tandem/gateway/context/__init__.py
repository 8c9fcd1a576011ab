"""Define what the HTTP and gRPC front ends and the packages behind them share: interfaces, the caller of a request,
rate limits.

`interfaces` defines what a front end calls: the request dispatcher, the stream of a request's output, quotas, keys and
prefixes. `request_context.RequestContext` describes the caller of one request, read from its headers or metadata.
`rate_limits` writes the `x-ratelimit-*` headers. `supervise.BackgroundLoop` calls a function again and again in one
task, and goes on when a call raises. Read `interfaces` first.
"""
