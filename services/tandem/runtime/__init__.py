"""Floor 4, the model in torch: weights, KV tensors, step plans to logits to tokens; never sees a job."""
