"""Tracks the speeds of ranks and links while a job trains, and decides when another plan pays for itself.

`detection.py` finds changes of speed, `past.py` says how long speeds last, `policy.py` decides, `live.py` is the
planner that a job asks.

Not here: The search for the plan (`planner/repartition/`), and moving the layers.
"""
