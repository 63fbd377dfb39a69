"""Launching: run options go in, watched worker processes and the exit code of the run come out.

It starts ranks with torchrun, passes signals on, and ends every process that it has started.
"""
