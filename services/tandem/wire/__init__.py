"""Floor 4, protobuf to core values and back, and clients; the only room that imports generated code."""
