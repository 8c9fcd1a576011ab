"""A package, so that what its tests share ends with the last of them and not with the whole run."""
