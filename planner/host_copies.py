"""Constants shared by host-memory copies and their cost model. A leaf."""

PART = 2**24
"""Parameters of a copy that are brought to the GPU together."""
