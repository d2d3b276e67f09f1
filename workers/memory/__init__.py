"""A rank's memory while it trains: what to do when it runs out, and before.

Not here: what a plan takes on device and host (`planner/simulation/`), and the readings of `sampling/`.
"""
