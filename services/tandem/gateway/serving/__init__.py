"""From a parsed body to the parts of its answer, the same for HTTP and gRPC.

Start with `completions`; `merge` interleaves the choices and prompts of one answer, `echo` repeats the prompt.
"""
