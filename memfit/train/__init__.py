"""Runs: a plan goes in, trained weights, checkpoints and metrics in a folder come out.

A run ends with an exit code of the contract, and goes on from its last checkpoint after any failure.
"""
