"""StreamSamples: a data set that can only be iterated, as samples by position.

A sample's number is its position, counted over all epochs. Every rank reads the whole stream and trains on its own
positions, so that no two ranks share a sample and the samples of a window do not depend on the number of ranks. What
the stream draws at a sample belongs to the position.

The newest samples are kept, so that a window can be collated again in other micro-batches. A position before those is
read by iterating anew, from the newest state that is known before it. A state that does not bring back the sample after
it is not used: the stream is then read from its start.
"""

from __future__ import annotations

import copy
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memfit.batch.rank_split import even
from memfit.batch.windows import Window
from memfit.errors import InputError, describe
from memfit.train.checkpoint.state_codec import KEPT, decode_alone, encode_alone
from memfit.train.loop.rng import STREAM, seed_stream

_NEVER = -1
MOST_STATES = 64
"""States of window starts that are remembered: more than any reading ahead spans."""


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """A stream where a window begins."""

    position: int
    epoch: int
    position_in_epoch: int
    state: dict[str, Any] | None
    """What the data set's ``state_dict`` gave, as ``encode_alone`` codes it: the same in every process and in a file,
    and nothing that the data set goes on writing into. None: it has none, one that no file can hold, or one that does
    not bring its order back, and reading begins anew."""
    checksum: int = 0
    """Of the sample at the position, by which a resumed run sees whether the state brings its order back."""


class StreamSamples:
    """Samples by position.

    Args:
        stream: iterated once for each epoch. ``set_epoch``, ``state_dict`` and ``load_state_dict`` are used where it
            has them.
        window: samples of a window: where one begins, the state is noted.
        keep: samples that are kept.

    Raises:
        InputError: it is an iterator, which cannot begin anew.
    """

    def __init__(self, stream: Iterable[Any], *, seed: int, window: int, keep: int) -> None:
        if isinstance(stream, Iterator):
            why = "it can be iterated once only, and a run that is resumed begins anew"
            write = "give an object whose __iter__ begins anew, as torch.utils.data.IterableDataset"
            raise InputError(f"dataset() of type {type(stream).__name__}", why, write)
        self._stream, self._seed, self._window, self._keep = stream, seed, window, keep
        self._has_state = callable(getattr(stream, "state_dict", None)) and callable(
            getattr(stream, "load_state_dict", None)
        )
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._states: OrderedDict[int, StreamState] = OrderedDict()
        self._known: StreamState | None = None
        self._noted: StreamState | None = None
        """A state whose first sample was not read yet."""
        self._first_state = self._copy_of_first_state() if self._has_state else None
        self._iterator: Iterator[Any] | None = None
        self._begins_with: StreamState | None = None
        self._expected: StreamState | None = None
        """Without a state of the data set: a position, and the checksum of the sample that an earlier process read
        there."""
        self._at, self._epoch, self._in_epoch = 0, 0, 0

    def __getitem__(self, position: int) -> Any:
        if position in self._kept:
            return self._kept[position]
        if position < self._at:
            self._go_back(position)
        while self._at <= position:
            self._read()
        return self._kept[position]

    def newest_state(self) -> StreamState | None:
        """The state at the last window start that was read up to; None where the data set has none."""
        return next(reversed(self._states.values()), None)

    def load(self, state: StreamState) -> None:
        """Goes on from a state that ``newest_state`` gave, in this process or another."""
        if self._known == state:
            return
        self._known = state
        if state.state is None:
            self._expected = state
        else:
            self._states[state.position] = state
        self._go_back(state.position)

    def forget(self) -> None:
        """As it was made: nothing is kept, and what was opened by iterating is let go."""
        self._states.clear()
        self._known = None
        self._go_back(0)

    def _go_back(self, position: int) -> None:
        """Iterates anew, from the newest known state at or before this position."""
        self._kept.clear()
        self._noted = None
        state = max(
            (known for known in self._states.values() if known.position <= position and known.state is not None),
            key=lambda known: known.position,
            default=None,
        )
        if state is None:
            self._at, self._epoch, self._in_epoch = 0, 0, 0
            if self._first_state is not None and self._iterator is not None:
                self._load_first_state()
        else:
            self._at, self._epoch, self._in_epoch = state.position, state.epoch, state.position_in_epoch
        self._iterator, self._begins_with = None, state

    def _iterate(self, epoch: int, state: StreamState | None = None) -> Iterator[Any]:
        set_epoch = getattr(self._stream, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        seed_stream(self._seed, epoch, _NEVER, STREAM)
        if state is not None:
            assert state.state is not None, "reading begins with states of the data set alone"
            self._stream.load_state_dict(decode_alone(state.state))  # type: ignore[attr-defined]
        return iter(self._stream)

    def _read(self) -> None:
        """Reads the next sample."""
        if self._iterator is None:
            self._iterator = self._iterate(self._epoch, self._begins_with)
        seed_stream(self._seed, self._at, _NEVER, STREAM)
        try:
            sample = next(self._iterator)
        except StopIteration:
            if not self._in_epoch:
                write = "give dataset() at least one sample"
                raise InputError("data set of 0 samples", "there is nothing to train on", write) from None
            self._epoch, self._in_epoch, self._iterator = self._epoch + 1, 0, None
            self._iterator = self._iterate(self._epoch)
            self._read()
            return
        except Exception:
            self._go_back(self._at)  # a generator ends with what it raises: going on with it would begin an epoch
            raise
        if not self._agrees(sample):
            return
        self._kept[self._at] = sample
        self._at, self._in_epoch = self._at + 1, self._in_epoch + 1
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        if self._at % self._window == 0 and self._at not in self._states:
            self._note_state()

    def _agrees(self, sample: Any) -> bool:
        """Completes the state that was noted before this sample. False where the state that reading began with has
        brought back another order, as of a shuffle's buffer: then the stream is read from its start."""
        begun, self._begins_with = self._begins_with, None
        if begun is not None and begun.position == self._at and begun.checksum != checksum(sample):
            why = "the data set's state_dict does not bring its order back, as of a shuffle's buffer"
            print(f"memfit: {why}: the stream is read from its start to sample {self._at}", file=sys.stderr, flush=True)
            self._has_state = False
            self._states.clear()
            self._load_first_state()
            self._go_back(0)
            return False
        expected = self._expected
        if expected is not None and expected.position == self._at:
            self._expected = None
            if expected.checksum != checksum(sample):
                why = f"the data set gave another sample at {self._at} before: its order changes when it begins anew"
                print(f"memfit: {why}, so samples may be left out or come twice; give it a seed", file=sys.stderr)
        if self._noted is not None and self._noted.position == self._at:
            self._states[self._at] = replace(self._noted, checksum=checksum(sample))
            self._noted = None
        return True

    def _note_state(self) -> None:
        self._noted = StreamState(
            position=self._at,
            epoch=self._epoch,
            position_in_epoch=self._in_epoch,
            state=self._coded_state() if self._has_state else None,
        )
        while len(self._states) > MOST_STATES:
            self._states.popitem(last=False)

    def _coded_state(self) -> dict[str, Any] | None:
        """The data set's state as it is now; None, from now on, where a part of it cannot be kept."""
        try:
            return encode_alone(self._stream.state_dict(), "the data set's state_dict")  # type: ignore[attr-defined]
        except InputError as error:
            why = f"{error.seen} is {error.why}, which no file can hold"
            print(f"memfit: {why}: a resumed run reads the stream from its start", file=sys.stderr, flush=True)
            self._has_state = False
            return None

    def _copy_of_first_state(self) -> Any:
        """The state with which the data set begins, which need not be kept in a file.

        Raises:
            InputError: it cannot be copied, so nothing brings the first sample back once it was read.
        """
        state = self._stream.state_dict()  # type: ignore[attr-defined]
        try:
            return copy.deepcopy(state)
        except Exception as error:
            write = f"give {KEPT} in state_dict()"
            raise InputError("the data set's state_dict", f"it cannot be copied: {describe(error)}", write) from error

    def _load_first_state(self) -> None:
        self._stream.load_state_dict(copy.deepcopy(self._first_state))  # type: ignore[attr-defined]


def checksum(value: Any) -> int:
    """Of a sample's tensors, arrays, numbers and texts, in any nesting."""
    if isinstance(value, Tensor):
        return checksum(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    if isinstance(value, Mapping):
        value = [part for key in value for part in (key, value[key])]
    if isinstance(value, list | tuple):
        return zlib.crc32(repr([checksum(part) for part in value]).encode())
    plain = value is None or isinstance(value, str | bytes | int | float)
    return zlib.crc32(repr(value if plain else type(value).__name__).encode())


class StreamWindows:
    """The windows of a stream: each holds the next ``global_batch`` positions. The end of an epoch cuts none short."""

    def __init__(self, *, global_batch: int, micro_batch: int, ranks: int = 1) -> None:
        self._global, self._micro, self._ranks = global_batch, micro_batch, ranks

    def window(self, number: int) -> Window:
        """The window of this number. Its epoch is 0: where an epoch ends is not known before it was read."""
        ids = range(number * self._global, (number + 1) * self._global)
        return Window(number=number, epoch=0, ranks=even(ids, self._micro, self._ranks))

    def per_epoch(self, epoch: int) -> int:
        """0: not known."""
        return 0
