"""Drawings: charts, heat maps, timelines of a step, memory over time, traces for Perfetto.

Not here: Which of them a page shows (`orchestrator/report/`).
"""
