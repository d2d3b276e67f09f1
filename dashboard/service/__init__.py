"""The web service: settings, who may do what, errors, start and end.

Not here: What a route answers (`api`, `pages`).
"""
