"""Keep the KV blocks of one worker, their hashes and their hand-off as plain data, without tensors."""
