"""Tables: files of rows, and the tokens of those rows on disk, which ranks share.

Not here: What a row is for (`workers/data/tasks/`).
"""
