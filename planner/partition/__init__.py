"""Where to cut the layers: one pure program per objective, from a profile to layers per stage.

Not here: Schedules, and the search over shapes.
"""
