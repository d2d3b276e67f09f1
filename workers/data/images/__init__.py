"""Images: from encoded bytes to a model's input, by Pillow, with random changes for training.

Not here: Where images lie (`workers/data/tables/`).
"""
