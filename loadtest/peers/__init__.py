"""Peers to compare with, each in a virtual environment of its own; none is ever a dependency of Tandem."""
