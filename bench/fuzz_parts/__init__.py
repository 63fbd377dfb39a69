"""Inputs for bench/fuzz.py: what each kind of file looks like, and how it is spoiled."""
