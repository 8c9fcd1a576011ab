"""Floor 4: encode and decode protobuf messages, authenticate calls, and configure gRPC channels and servers.

Only this package imports the generated protobuf code.
"""
