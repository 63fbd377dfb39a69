"""Targets with one fault each, as the training projects have them, and their cures (``…_cured``)."""
