"""Adaptation while a job trains: layers leave ranks that have become slow, or whose memory runs short.

Not here: what counts as slow, and which plan pays (`planner/adapt/`, `planner/repartition/`).
"""
