"""The same forward pass, quick: packed tokens, merged weights, a backward written out.

Skip it on a first reading: the stock model computes the same numbers, and tests hold this room to it.
"""
