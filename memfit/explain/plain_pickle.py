"""Reads a pickle of plain containers and nothing else: dicts, lists, tuples, sets, numbers, texts and bytes.

A pickle is a program. This reader knows only the instructions that make plain values; one that names a class or a
function, calls something or refers outside is refused with the name that it asked for. It differs from
``pickle.Unpickler`` with a guarded ``find_class`` in what it holds against damage: a length past the end of the file,
a memo index without a value, a key that is a container (hashing a deep tuple overflows C's stack), and more values
than ``MOST`` are errors before memory is taken for them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from memfit.errors import InputError

MOST = 200_000_000
"""Instructions at most."""
_MARK = object()
_KEYS = (str, int, bytes, float, bool, type(None))


class PickleRefusedError(ValueError):
    """The bytes are no pickle, or one that makes more than plain containers. The message says what was met."""


def read_plain_pickle(data: bytes, seen: str) -> Any:
    """The value of a pickle.

    Args:
        seen: the file, as the user wrote it.

    Raises:
        InputError: the pickle asks for a class, a function or an object outside; or it is damaged.
    """
    try:
        return _Reader(data).read()
    except PickleRefusedError as error:
        write = "write a snapshot of torch.cuda.memory._dump_snapshot(), which holds plain containers"
        raise InputError(seen, str(error), write) from None
    except (IndexError, struct.error, ValueError, OverflowError, TypeError, AttributeError, KeyError):
        write = "copy the file again: torch.cuda.memory._dump_snapshot() writes such files"
        raise InputError(seen, "a damaged pickle", write) from None


class _Reader:
    """Runs the instructions of one pickle."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self) -> Any:
        known, stop = _INSTRUCTIONS, ord(".")
        for _ in range(MOST):
            code = self.data[self.at]
            self.at += 1
            if code == stop:
                value = self.stack.pop()
                if value is _MARK:
                    raise PickleRefusedError("a damaged pickle")
                return value
            act = known.get(code)
            if act is None:
                raise PickleRefusedError(self.refusal(code))
            act(self)
        raise PickleRefusedError(f"a pickle of more than {MOST} instructions")

    def refusal(self, code: int) -> str:
        """What an instruction that makes more than plain containers asks for."""
        if code in b"ci":
            asked = b".".join((self.line(), self.line()))
            return f"the pickle asks for {asked.decode(errors='replace')[:200]}"
        if code == 0x93 and len(self.stack) >= 2:
            module, name = self.stack[-2:]
            if isinstance(module, str) and isinstance(name, str):
                return f"the pickle asks for {module[:100]}.{name[:100]}"
        name = _REFUSED.get(code)
        return f"the pickle {name}" if name else "no pickle of plain containers"

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise PickleRefusedError("the pickle ends in the middle of a value")
        self.at, start = end, self.at
        return self.data[start:end]

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise PickleRefusedError("the pickle ends in the middle of a line")
        self.at, start = end + 1, self.at
        return self.data[start:end]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        """Takes the values above the last mark from the stack."""
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is _MARK:
                values = stack[index + 1 :]
                del stack[index:]
                return values
        raise PickleRefusedError("a damaged pickle")

    def container(self, kind: type) -> Any:
        value = self.stack[-1]
        if type(value) is not kind:
            raise PickleRefusedError("a damaged pickle")
        return value

    def extend_dict(self, pairs: list[Any]) -> None:
        target = self.container(dict)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            target[_key(key)] = value

    def text(self, count: int) -> None:
        self.push(self.take(count).decode("utf-8", "surrogatepass"))

    def put(self, index: int) -> None:
        value = self.stack[-1]
        if value is _MARK:
            raise PickleRefusedError("a damaged pickle")
        self.memo[index] = value

    def long(self, count: int) -> None:
        if count > 1 << 16:
            raise PickleRefusedError("the pickle holds a number of more than 65536 bytes")
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def old_int(self) -> None:
        line = self.line()
        self.push({b"00": False, b"01": True}.get(line) if line in (b"00", b"01") else _whole(line))

    def old_string(self) -> None:
        line = self.line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in b"'\"":
            raise PickleRefusedError("a damaged pickle")
        self.push(line[1:-1].decode("unicode_escape"))


def _whole(line: bytes) -> int:
    if len(line) > 4096:
        raise PickleRefusedError("the pickle holds a number of more than 4096 digits")
    return int(line.rstrip(b"L"))


def _key(value: Any) -> Any:
    if not isinstance(value, _KEYS) and not (isinstance(value, tuple) and all(isinstance(v, _KEYS) for v in value)):
        raise PickleRefusedError(f"the pickle has a {type(value).__name__} as a key")
    return value


def _tuple_of(count: int) -> Callable[[_Reader], None]:
    def act(reader: _Reader) -> None:
        values = tuple(reader.stack[-count:])
        if len(values) != count or any(value is _MARK for value in values):
            raise PickleRefusedError("a damaged pickle")
        del reader.stack[-count:]
        reader.push(values)

    return act


def _append(reader: _Reader) -> None:
    value = reader.stack.pop()
    reader.container(list).append(value)


def _set_item(reader: _Reader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    reader.extend_dict([key, value])


def _appends(reader: _Reader) -> None:
    values = reader.since_mark()
    reader.container(list).extend(values)


def _add_items(reader: _Reader) -> None:
    values = reader.since_mark()
    reader.container(set).update(map(_key, values))


def _new_dict(reader: _Reader) -> None:
    pairs = reader.since_mark()
    reader.push({})
    reader.extend_dict(pairs)


def _set_items(reader: _Reader) -> None:
    pairs = reader.since_mark()
    reader.extend_dict(pairs)


_INSTRUCTIONS: dict[int, Callable[[_Reader], Any]] = {
    0x80: lambda reader: reader.take(1),  # PROTO
    0x95: lambda reader: reader.take(8),  # FRAME
    ord("("): lambda reader: reader.push(_MARK),
    ord("0"): lambda reader: reader.stack.pop(),
    ord("1"): lambda reader: reader.since_mark(),
    ord("2"): lambda reader: reader.push(reader.stack[-1]),
    ord("N"): lambda reader: reader.push(None),
    0x88: lambda reader: reader.push(True),
    0x89: lambda reader: reader.push(False),
    ord("I"): _Reader.old_int,
    ord("L"): lambda reader: reader.push(_whole(reader.line())),
    ord("J"): lambda reader: reader.push(reader.number("<i")),
    ord("K"): lambda reader: reader.push(reader.number("<B")),
    ord("M"): lambda reader: reader.push(reader.number("<H")),
    0x8A: lambda reader: reader.long(reader.number("<B")),
    0x8B: lambda reader: reader.long(reader.number("<i")),
    ord("F"): lambda reader: reader.push(float(reader.line())),
    ord("G"): lambda reader: reader.push(struct.unpack(">d", reader.take(8))[0]),
    ord("S"): _Reader.old_string,
    ord("V"): lambda reader: reader.push(reader.line().decode("raw-unicode-escape")),
    ord("X"): lambda reader: reader.text(reader.number("<I")),
    0x8C: lambda reader: reader.text(reader.number("<B")),
    0x8D: lambda reader: reader.text(reader.number("<Q")),
    ord("B"): lambda reader: reader.push(reader.take(reader.number("<I"))),
    ord("C"): lambda reader: reader.push(reader.take(reader.number("<B"))),
    0x8E: lambda reader: reader.push(reader.take(reader.number("<Q"))),
    ord("T"): lambda reader: reader.push(reader.take(reader.number("<i")).decode("latin-1")),
    ord("U"): lambda reader: reader.push(reader.take(reader.number("<B")).decode("latin-1")),
    ord(")"): lambda reader: reader.push(()),
    ord("]"): lambda reader: reader.push([]),
    ord("}"): lambda reader: reader.push({}),
    0x8F: lambda reader: reader.push(set()),
    0x90: _add_items,
    0x91: lambda reader: reader.push(frozenset(map(_key, reader.since_mark()))),
    ord("a"): _append,
    ord("e"): _appends,
    ord("l"): lambda reader: reader.push(reader.since_mark()),
    ord("d"): _new_dict,
    ord("s"): _set_item,
    ord("u"): _set_items,
    ord("t"): lambda reader: reader.push(tuple(reader.since_mark())),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    0x94: lambda reader: reader.put(len(reader.memo)),
    ord("q"): lambda reader: reader.put(reader.number("<B")),
    ord("r"): lambda reader: reader.put(reader.number("<I")),
    ord("p"): lambda reader: reader.put(_whole(reader.line())),
    ord("h"): lambda reader: reader.push(reader.memo[reader.number("<B")]),
    ord("j"): lambda reader: reader.push(reader.memo[reader.number("<I")]),
    ord("g"): lambda reader: reader.push(reader.memo[_whole(reader.line())]),
}
_REFUSED = {
    ord("R"): "calls a function", ord("o"): "makes an object", 0x81: "makes an object", 0x92: "makes an object",
    ord("b"): "sets an object's state", ord("P"): "refers to an object outside of it",
    ord("Q"): "refers to an object outside of it", 0x82: "asks for a registered extension",
    0x83: "asks for a registered extension", 0x84: "asks for a registered extension",
    0x93: "asks for a class or a function", 0x96: "holds a bytearray", 0x97: "holds a buffer outside of it",
    0x98: "holds a buffer outside of it",
}  # fmt: skip
