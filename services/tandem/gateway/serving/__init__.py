"""Turn a parsed request body into the parts of its response, for both front ends.

`completions.CompletionService` checks, tokenizes and admits a body; the `CompletionStream` that it returns yields the
parts of the output, which HTTP or gRPC formats. `echo` repeats the prompt with its log probabilities, and `merge`
combines the outputs of several prompts into one stream. Read `completions` first.
"""
