"""What is learned from: files, corpora and their rubrics, text to ids, base models.

This room imports no other.
"""
