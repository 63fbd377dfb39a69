"""Checks of data, ``assert ids.min() >= 0`` or ``if not ok.all(): raise``: which answer leads past them.

A trace has no data, and a batch is taken to be as its code demands. The bytecode of the line that asks shows where each
answer leads.
"""

from __future__ import annotations

import dis
from bisect import bisect_right
from types import CodeType, FrameType

_BETWEEN = frozenset({"UNARY_NOT", "TO_BOOL", "NOP", "EXTENDED_ARG", "CACHE", "PRECALL"})
"""What may stand between the question and the jump that depends on it."""
_LONGEST = 80
"""Instructions of a branch that are looked at."""


def passing_answer(frame: FrameType) -> bool | None:
    """The truth value with which the code of a frame goes on and does not raise; None: neither branch raises, or both.

    The frame is asking for the truth of a tensor, or calling what gives it.
    """
    instructions = _instructions(frame.f_code)
    offsets = [instruction.offset for instruction in instructions]
    position, negated = bisect_right(offsets, frame.f_lasti) - 1, False
    if not _jumps(instructions[position]):
        negated = instructions[position].opname == "UNARY_NOT"
        position += 1
        while position < len(instructions) and instructions[position].opname in _BETWEEN:
            negated ^= instructions[position].opname == "UNARY_NOT"
            position += 1
    if position >= len(instructions) or not _jumps(instructions[position]):
        return None
    jump = instructions[position]
    if jump.argval not in offsets:
        return None
    jumped, fell = _raises(instructions, offsets.index(jump.argval)), _raises(instructions, position + 1)
    if jumped == fell:
        return None
    jumps_if_true = "IF_TRUE" in jump.opname
    return (jumps_if_true if fell else not jumps_if_true) != negated


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


def _jumps(instruction: dis.Instruction) -> bool:
    return "JUMP" in instruction.opname and ("IF_TRUE" in instruction.opname or "IF_FALSE" in instruction.opname)


def _raises(instructions: list[dis.Instruction], start: int) -> bool:
    """Whether the straight line from here ends in ``raise``."""
    for instruction in instructions[start : start + _LONGEST]:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname or instruction.opname.startswith(("RETURN", "FOR_ITER", "YIELD")):
            return False
    return False
