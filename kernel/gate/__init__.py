"""A user's own data: read in every shape, checked before a model is loaded, laid out as a corpus.

Opened by `00_prepare.py --data` only.
"""
