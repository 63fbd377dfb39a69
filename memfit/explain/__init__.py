"""Explains a memory failure: a message, log, memory summary, snapshot, nvidia-smi or metrics file goes in.

The cause and the changes that would have helped come out.
"""
