"""Checkpoints: a train state goes in, files that are complete or not there come out, and back again.

They hold safetensors and JSON; what a killed process left half-written is never read.
"""
