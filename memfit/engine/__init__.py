"""Engines: a job's nets and a process group go in, nets that one or many ranks train as one come out.

An engine is a frozen class of the interface ``protocol.Engine``; ``factory`` finds it by its name, and
``capabilities`` tells what it does before it is made.
"""
