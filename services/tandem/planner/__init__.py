"""Scale a cluster to its demand: observe gateways and workers, decide pool sizes, and have Serve or Kubernetes apply
them."""
