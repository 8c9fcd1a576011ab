"""Load the model in torch and execute step plans: weights, KV tensors, logits, sampled tokens.

Floor 4 of the import layers. This room sees plans and slices, not jobs or requests.
"""
