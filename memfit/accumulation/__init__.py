"""Exact gradient accumulation in a loop that a person owns, and repeating a window that ran out of memory."""
