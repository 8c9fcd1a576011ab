"""Floor 5, the gateway: HTTP in, jobs to workers, tokens back; never imports torch or a model."""
