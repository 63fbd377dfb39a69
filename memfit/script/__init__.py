"""Scripts: takes the command of a user's training script; gives the trace of its steps on a virtual card.

The script runs unmodified in a sandbox (``memfit trace -- python train.py``).
"""
