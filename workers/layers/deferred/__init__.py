"""Weight gradients that wait: which modules defer them, the queue, and how each is formed.

Not here: When they are formed: `workers/step/engine.py` does that, through `stage.py` and `layer.py`. Modules that
are not covered keep their whole graph instead, in `workers/layers/layer.py`.
"""
