"""Traces: a job, a shape and a device go in, every allocation of a training window comes out as a ``Trace``.

The job runs on fake tensors, so a trace takes seconds and little memory; sizes of other shapes follow by polynomials.
"""
