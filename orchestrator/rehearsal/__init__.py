"""Spot traces replayed against a job on Ray nodes of one machine.

Not here: Single faults (`workers/fault_injection/`).
"""
