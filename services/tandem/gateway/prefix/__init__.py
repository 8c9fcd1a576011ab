"""Keep this gateway's mirror of the prefix index, and look up in it which workers cache the beginning of a prompt.

`prefix_index_client.PrefixIndexClient` reads the index from Redis in the background and answers lookups from memory.
`hash_prompt_blocks` computes the hashes of a prompt's blocks, by which the mirror is searched. The entries come from
workers through `tandem.stores.prefix_index`."""
