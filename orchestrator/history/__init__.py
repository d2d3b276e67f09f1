"""A run from its folder: the event log folded into records of steps, recoveries, freezing and curvature.

Not here: Numbers that need a simulator (`orchestrator/analysis/`).
"""
