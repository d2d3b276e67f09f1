"""The REST interface, `/api/v1`: a module per subject, each with its routes and their models.

Not here: Pages; decisions about jobs, which controllers make.
"""
