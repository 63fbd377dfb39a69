"""Engines: a job's nets on one rank or on many, behind one small interface (``protocol.Engine``).

An engine is a module of this folder with a frozen class of that interface; ``start`` finds it by its name.
"""
