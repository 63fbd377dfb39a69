"""Devices: a card's name or this machine goes in, a description of its hardware or a virtual card comes out.

``hardware`` holds facts and measurements, ``virtual`` lets code run on a card that is not there.
"""
