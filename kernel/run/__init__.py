"""One stage in one run folder: flags, settings, exact state, lineage, lock, isolation, preflight.

Nothing here is about learning. `stage.py` is what a numbered script opens first.
"""
