"""Memory-saving options: a plan traced in full and its variants go in, a MemoryOption for each option comes out.

Each states its bytes by phase, its cost in time, whether the plan applies it, and why.
"""
