"""Measurements for the interference model: a stage that runs again and again, and neighbours that disturb it.

Not here: the model (`planner/interference/`), and collecting the windows (`orchestrator/prepare/collecting.py`).
"""
