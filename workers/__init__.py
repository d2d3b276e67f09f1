"""Trains: one rank's path from a schedule to a committed step, in `engine.py`, `stage.py`, `layer.py`,
`training.py` and `rank.py`.

Not here: Decisions about plans; Ray is only in `actor.py`.
"""
