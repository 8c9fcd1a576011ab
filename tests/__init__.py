"""Tests; a package, so that packages below it have one name wherever they are imported from."""
