"""Rows in, figures out: metrics, verdict, the judge's report card, over-optimisation, tables.

No model, no training, no file: a finished run's figures can be made again from its rows.
"""
