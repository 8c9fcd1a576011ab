"""What can be deployed: accelerators, measured profiles and pools of workers that become a cluster."""
