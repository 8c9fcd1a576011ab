"""Measure costs that grow with the cluster: placement, routing, prefix index, registry, autoscaling and simulation."""
