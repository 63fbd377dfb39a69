"""The probe: a plan goes in, memory and time of a few real windows beside the prediction come out.

No checkpoint is written, and the plan stays as it is.
"""
