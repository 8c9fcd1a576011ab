"""The gRPC front end of the gateway: inference.proto's service and grpc.health.v1, over the same serving code as HTTP.

`server.GrpcServer` listens; `service` has one method per RPC, which authenticates the caller and passes the translated
body to `serving.completions`. `requests` translates messages into the bodies of the HTTP API, `responses` formats the
output as messages, and `call` sends metadata, messages and errors of one call. Read `service` first."""
