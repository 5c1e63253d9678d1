"""The report of a run on one page: what it shows, its pictures, each metric's healthy band.

Nothing is measured here.
"""
