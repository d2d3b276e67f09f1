"""The same bits every time: keyed random draws, canonical layouts, deterministic kernels, digests.

Not here: The order of sums (`workers/gradients/exchange.py`).
"""
