"""Servers and workers that measurements start, pause and end."""
