"""Forward passes and logits of models, one file per implementation.

`causal` defines the interface that executors call. `decoder` implements it for the Llama family on any set of kernels,
on CPU or GPU and with tensor parallelism; read it first, it is the reference. `compiled` implements it on the compiled
CPU kernels."""
