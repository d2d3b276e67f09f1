"""One command for each thing that is measured: `python -m benchmarks.NAME`, or all of them in turn.

Not here: what they share (`benchmarks/parts/`), and the figures (`docs/measurements.md`).
"""
