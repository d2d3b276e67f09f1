"""States shared out among siblings: the weights that each computes with, and whole layers for checkpoints.

Not here: how a layer is cut (`planner/shards.py`); the sums of gradients (`workers/gradients/exchange.py`).
"""
