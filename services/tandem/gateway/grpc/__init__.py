"""The gRPC front end: inference.proto's service and grpc.health.v1, as translators over the same serving code.

Start with `service`.
"""
