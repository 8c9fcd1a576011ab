"""Load the model in torch and execute step plans: weights, KV tensors, logits, sampled tokens.

This package (import layer 4) owns the weights and the KV memory of one worker process. It knows step plans and their
slices (`tandem.sched.state.step_plan`), not jobs or requests. `model_loader.load_model` is the entry point: it resolves
the model id, loads the weights and returns an executor with tokenizer and fingerprint. Read `executor` first, the
synchronous reference; `async_executor` runs the same plans ahead on a GPU. `models` holds the forward passes,
`parallel` and `ranks` tensor parallelism.
"""
