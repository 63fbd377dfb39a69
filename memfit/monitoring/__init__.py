"""Watches memory, time and speed of a loop that a person owns, step by step."""
