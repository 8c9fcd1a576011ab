"""Floor 5, the gateway: HTTP in, jobs to workers, tokens back; never imports torch or a model."""

import os

# gRPC's newer client hands each message through three or four threads of its own before it reaches the event loop;
# its older poller takes one, at a third of the processor time. Read when grpc is imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
