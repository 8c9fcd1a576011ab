"""Forward passes and logits of models, one file per family of architectures."""
