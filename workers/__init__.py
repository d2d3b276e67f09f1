"""Trains: one rank's path from a schedule to a committed step, in `rank.py`, `step/`, `layers/` and `commit/`.

Not here: Decisions about plans; Ray is only in `actor.py`.
"""
