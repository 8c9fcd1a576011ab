"""Floor 5, the worker: an engine thread, a transfer thread and a gRPC service; never knows a role."""
