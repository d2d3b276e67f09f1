"""Freezing while a job trains: the planner that solves for it, changes of its settings, and whether it pays.

Not here: what a change takes (`orchestrator/controller/requests/freeze_request.py`), the program (`planner/freeze/`).
"""
