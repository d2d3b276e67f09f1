"""Freeze ratios: bounds from monitored steps, the linear program, and whether freezing pays.

Not here: Which parameters freeze (`workers/freezing/`).
"""
