"""Verification: a plan and numbers of ranks go in, differences of losses, gradients and weights with bounds come out.

Real ranks train the same windows as one rank; a difference beyond rounding is a fault that is named.
"""
