"""The event log folded into records of a run: steps, recoveries, freezing, curvature.

Not here: Numbers that need a simulator (`orchestrator/analysis/`).
"""
