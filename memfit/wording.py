"""Words for people."""


def counted(count: int, noun: str) -> str:
    """``1 module``, ``2 modules``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
