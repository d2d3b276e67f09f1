"""Shows and controls jobs in a browser; empty so far.

Not here: Torch and workers: it reaches jobs through the client.
"""
