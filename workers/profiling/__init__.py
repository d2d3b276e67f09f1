"""Measurement before a job: times and bytes of layers, links between ranks, and one profile made of them.

Not here: What a profile means (`planner/profile.py`).
"""
