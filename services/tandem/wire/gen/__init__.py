"""What protoc made of proto/; regenerate with `make proto`, never edit."""
