"""Suggestions: the smallest footprint of a job that does not fit goes in, what would make it fit comes out.

Smaller settings of the job are traced; larger hardware follows from the footprint's sums; none is applied.
"""
