"""Samples of a rank's device and its host while it trains, taken in a thread of their own.

Not here: what the features mean (`planner/features.py`), and the times of the rank's actions
(`workers/step/step_reports.py`).
"""
