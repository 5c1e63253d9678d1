"""What is done with a finished run: verify it, export it, ask its policies.

Nothing here trains.
"""
