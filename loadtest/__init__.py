"""Measure Tandem and its parts from outside: load tests, benchmarks, comparisons; no part of what serves requests."""
