"""Slowdown of a stage by its surroundings: windows measured beside neighbours, and models fitted to them.

Not here: measuring the windows (`orchestrator/prepare/collecting.py`), and what a slowdown is worth (`planner/adapt/`).
"""
