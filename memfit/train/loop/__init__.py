"""The training loop: a plan, a train state and a data set go in, windows, validations and metrics come out.

Each window is checked for numbers that are not finite, and written to disk before the next one ends.
"""
