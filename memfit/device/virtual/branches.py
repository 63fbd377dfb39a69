"""Where the answers to a question about data lead: past a check that raises, or out of the loop that asks.

A trace has no data, and a batch is taken to be as its code demands: of ``assert ids.min() >= 0`` or ``if not ok.all():
raise``, the answer is the one that goes on. The bytecode of the line that asks shows where each answer leads.
"""

from __future__ import annotations

import dis
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType

_BETWEEN = frozenset({"UNARY_NOT", "TO_BOOL", "NOP", "EXTENDED_ARG", "CACHE", "PRECALL"})
"""What may stand between the question and the jump that depends on it."""
_LONGEST = 80
"""Instructions of a branch that are looked at."""


@dataclass(frozen=True, kw_only=True)
class _Branches:
    """The jump that depends on a question, and where it leads."""

    jump: dis.Instruction
    jumped: int
    """The position of the instruction after the jump, if it is taken."""
    fell: int
    """That of the next one, if not."""
    jumps_if: bool
    """The answer with which it is taken."""


def passing_answer(frame: FrameType) -> bool | None:
    """The truth value with which the code of a frame goes on and does not raise; None: neither branch raises, or both.

    The frame is asking for the truth of a tensor, or calling what gives it.
    """
    branches = _branches(frame)
    if branches is None:
        return None
    instructions = _instructions(frame.f_code)
    jumped, fell = _raises(instructions, branches.jumped), _raises(instructions, branches.fell)
    return None if jumped == fell else branches.jumps_if == fell


def leaving_answer(frame: FrameType) -> bool | None:
    """The truth value with which the code of a frame leaves the loop that asks, as ``passing_answer`` has it; None: no
    loop asks, or neither branch leaves it, or both.
    """
    branches = _branches(frame)
    if branches is None:
        return None
    instructions = _instructions(frame.f_code)
    loop = _innermost_loop(instructions, branches.jump.offset)
    if loop is None:
        return None
    jumped, fell = _leaves(instructions, branches.jumped, loop), _leaves(instructions, branches.fell, loop)
    return None if jumped == fell else branches.jumps_if == jumped


def asks_in_for(frame: FrameType) -> bool:
    """Whether the innermost loop that asks is a ``for`` loop, which ends by itself."""
    instructions = _instructions(frame.f_code)
    loop = _innermost_loop(instructions, frame.f_lasti)
    if loop is None:
        return False
    names = (step.opname for step in instructions if step.offset >= loop[0] and step.opname != "EXTENDED_ARG")
    return next(names) == "FOR_ITER"


def decides_branch(frame: FrameType) -> bool:
    """Whether the code of a frame branches on what it is asking, and does not keep or return it."""
    return _branches(frame) is not None


@lru_cache(256)
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


def _branches(frame: FrameType) -> _Branches | None:
    """The jump that depends on what a frame is asking; None where none does."""
    instructions = _instructions(frame.f_code)
    offsets = [instruction.offset for instruction in instructions]
    position, negated = bisect_right(offsets, frame.f_lasti) - 1, False
    if not _depends(instructions[position]):
        negated = instructions[position].opname == "UNARY_NOT"
        position += 1
        while position < len(instructions) and instructions[position].opname in _BETWEEN:
            negated ^= instructions[position].opname == "UNARY_NOT"
            position += 1
    if position >= len(instructions) or not _depends(instructions[position]):
        return None
    jump = instructions[position]
    if jump.argval not in offsets:
        return None
    return _Branches(
        jump=jump, jumped=offsets.index(jump.argval), fell=position + 1, jumps_if=("IF_TRUE" in jump.opname) != negated
    )


def _depends(instruction: dis.Instruction) -> bool:
    """Whether it jumps where a truth value says so."""
    return "JUMP" in instruction.opname and ("IF_TRUE" in instruction.opname or "IF_FALSE" in instruction.opname)


def _raises(instructions: list[dis.Instruction], start: int) -> bool:
    """Whether the straight line from here ends in ``raise``."""
    for instruction in instructions[start : start + _LONGEST]:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname or instruction.opname.startswith(("RETURN", "FOR_ITER", "YIELD")):
            return False
    return False


def _innermost_loop(instructions: list[dis.Instruction], offset: int) -> tuple[int, int] | None:
    """(first offset, last offset) of the smallest loop that an instruction is in; None where it is in none."""
    ends: dict[int, int] = {}
    for instruction in instructions:
        if "JUMP" in instruction.opname and instruction.argval <= instruction.offset:
            ends[instruction.argval] = instruction.offset
    around = [(start, end) for start, end in ends.items() if start <= offset <= end]
    return max(around, default=None)


def _leaves(instructions: list[dis.Instruction], start: int, loop: tuple[int, int]) -> bool:
    """Whether the straight line from here leaves a loop, as ``break`` and ``return`` do."""
    for instruction in instructions[start : start + _LONGEST]:
        if not loop[0] <= instruction.offset <= loop[1] or instruction.opname.startswith(("RETURN", "RAISE")):
            return True
        if "JUMP" in instruction.opname:
            unconditional = not _depends(instruction)
            return unconditional and not loop[0] <= instruction.argval <= loop[1]
        if instruction.opname.startswith(("FOR_ITER", "YIELD")):
            return False
    return False
