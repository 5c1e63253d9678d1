"""Experiments on reward models and KL, and the plan of a reward model for a behaviour.

Recipes of ordinary stages: nothing here is part of a stage's identity.
"""
