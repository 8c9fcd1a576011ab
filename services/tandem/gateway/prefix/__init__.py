"""The gateway's mirror of the prefix index, and the hashes of a prompt's blocks by which it is searched."""
