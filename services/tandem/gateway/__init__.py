"""Run the gateway (import layer 5): the process that clients call over HTTP or gRPC.

It sends their requests to workers as jobs and streams the output back, and imports neither torch nor a model. A request
enters by `http` or `grpc`, is parsed in `openai`, authenticated in `tenants`, answered by `serving`, and run by
`orchestration` on the workers of `workers`. `main` composes the program, `app` the ASGI application, and `gauges`
exports the current state of their parts as metrics. Read `http.openai_routes`, `serving.completions` and
`orchestration.driver` first, in this order.
"""

import os

# gRPC's newer client hands each message through three or four threads of its own before it reaches the event loop;
# its older poller takes one, at a third of the processor time. Read when grpc is imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
