"""The jobs that the service shows: live ones kept up to date from their controllers, past ones from their folders.

Not here: HTTP.
"""
