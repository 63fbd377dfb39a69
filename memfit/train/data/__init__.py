"""Batches for the training loop: read in worker processes ahead of the window, or in the process that trains.

In: a data set, the samples of each window, a number of workers. Out: collated batches on the host, the same bit for bit
with any number of workers.
"""
