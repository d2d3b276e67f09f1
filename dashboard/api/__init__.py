"""The REST interface, `/api/v1`: a module per subject, each with its routes and their models.

A new module's router is included in `dashboard/app.py`.

Not here: Pages; decisions about jobs, which controllers make.
"""
