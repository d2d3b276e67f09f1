"""A rank's memory while it trains: what to do when it runs out, and before.

Not here: What a plan takes (`planner/simulation/memory.py`), and the readings of `sampling/`.
"""
