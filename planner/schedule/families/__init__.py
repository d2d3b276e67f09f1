"""One pure function per schedule family: GPipe, 1F1B, interleaved, ZB-H1 and ZBV.

Not here: Their names (`planner/schedule/registry.py`) and their validation.
"""
