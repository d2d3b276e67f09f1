"""Data sets: built-in sources, tokenizers, the token cache, and which samples a microbatch holds.

Not here: Models and losses.
"""
