"""The job's life as a pure state machine: states, stimuli, effects; decides on failures, joins and moves.

Not here: Ray, a clock, I/O.
"""
