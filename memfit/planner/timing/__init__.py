"""Timing: a trace and a device's rates go in, estimated seconds of a window with their measured error come out.

Operators follow the roofline model, ranks the cost of ring collectives, and a probed window corrects both.
"""
