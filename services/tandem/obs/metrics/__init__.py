"""What is measured (`instruments`), how it is counted (`metrics`), and how it is exposed to Prometheus and OTLP."""
