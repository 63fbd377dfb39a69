"""Words for people."""

TURNS = "a run may make more turns, and need more than predicted"
"""The end of what is said of a loop whose condition was assumed."""

LONGER = "a longer run needs more than predicted"
"""The end of what is said of a line that holds more after each step, or each batch of a pass that was cut short."""

COALESCE = "coalesce"
"""What is said to have been assumed of sparse gradients whose entries may be of the same rows."""


def counted(count: int, noun: str) -> str:
    """``1 module``, ``2 modules``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def units_in_words(count: int, unit: str) -> str:
    """``1 sample``, ``2 samples``; units are named in the plural."""
    return f"{count} {unit.removesuffix('s') if count == 1 else unit}"


def precision_words(precision: str, net_kind: str) -> str:
    """A job's precision; where it has no autocast, the type of the weights if that is another than fp32.

    Args:
        precision: fp32, bf16 or fp16.
        net_kind: ``Trace.net_kind`` of its step, which names the type that it computes in; empty: unknown.
    """
    if precision != "fp32":
        return precision
    if "bfloat16" in net_kind:
        return "bf16 weights"
    return "fp16 weights" if "float16" in net_kind else precision
