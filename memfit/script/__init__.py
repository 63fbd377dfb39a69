"""Scripts: the command of a person's own training script goes in, the trace of its steps on a virtual card comes out.

The script runs unmodified in a sandbox (``memfit trace -- python train.py``).
"""
