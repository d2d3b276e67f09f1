"""Decides: pure functions from profiles to schedules, plans and freeze ratios, and the leaf types that workers
share.

Not here: Torch, a clock, I/O; Ray is only in `actor.py`.
"""
