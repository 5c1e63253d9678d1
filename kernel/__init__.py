"""Shared code of the stages: what two of them use, or what needs a proof of its own."""
