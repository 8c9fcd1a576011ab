"""Measures a running Tandem from outside; never a part of what serves."""
