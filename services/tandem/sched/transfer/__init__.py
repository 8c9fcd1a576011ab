"""Sequences whose KV moves between workers: migration, prefixes fetched from others, and prefixes served to them."""
