"""torchtitan as a target: its own trainer runs on the virtual card and a fake process group, as a script does.

Only ``config``, ``describe`` and ``trainer`` import torchtitan, each in a process of its own.
"""
