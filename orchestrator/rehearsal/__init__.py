"""Spot traces replayed against a job on Ray nodes of one machine, and neighbours that slow a rank down.

Not here: Single faults (`workers/fault_injection/`), and the neighbours' programs (`workers/interference/`).
"""
