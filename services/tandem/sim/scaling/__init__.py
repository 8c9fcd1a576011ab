"""Simulated runs in which an autoscaler changes the number of workers."""
