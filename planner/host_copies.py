"""What a rank that keeps copies in a GPU's host memory and its simulation both count with. A leaf."""

PART = 2**24
"""Parameters of a copy that are brought to the GPU together."""
