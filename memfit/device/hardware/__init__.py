"""Hardware: the name of a card, a driver or the operating system goes in, a ``Device`` with sources comes out.

It has the catalogue, what ``memfit calibrate`` measures, and limits of processes and memory on this machine.
"""
