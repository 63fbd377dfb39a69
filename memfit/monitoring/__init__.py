"""Monitoring: the steps of a user's own loop go in; metrics, and leaks with what holds them, come out.

It reads memory, time and speed at each step, and changes nothing.
"""
