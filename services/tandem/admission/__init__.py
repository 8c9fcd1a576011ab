"""Floor 2, who may have how much and whose turn it is; never reads a clock or asks a store."""
