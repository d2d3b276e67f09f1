"""Simulates a schedule: costs of actions and messages, start and end of each action, and the memory that a plan takes
on each rank's device (`memory.py`) and host (`standby_memory.py`, `snapshot_cost.py`).

Not here: Any choice between plans.
"""
