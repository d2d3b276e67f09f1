"""The job's life as a pure machine: states, stimuli, commands, and the decisions on failures, joins and moves.

Not here: Ray, a clock, I/O.
"""
