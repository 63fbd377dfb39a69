"""What the turns of a window share: the batch and a dict if the window has one micro-batch, otherwise the random
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.apply.buffer_snapshot import BufferSnapshot
from memfit.apply.losses import MicroBatch, losses_of
from memfit.apply.random_state import RandomState, random_state, set_random_state
from memfit.apply.train_state import TrainState
from memfit.job import Turn


class TurnCache:
    """Caches what the turns of a window share. A window with one turn shares nothing, and costs nothing here.

    After a failure a turn may begin again, in the same or in other micro-batches. What earlier turns left for it is
    then made again from the same random numbers: their forwards run again, without their backwards.
    """

    def __init__(self, train_state: TrainState, turns: Sequence[Turn]) -> None:
        self.values: dict[str, Any] = {}
        """What the losses of one micro-batch share."""
        self._rig, self._turns = train_state, turns
        self._batch: list[Any] = []
        self._begin: dict[int, RandomState] = {}
        self._at: Turn | None = None

    def begin(self, turn: Turn) -> None:
        """Begins a turn, or begins it again after a failure; graphs of the failed attempt are dropped."""
        if turn is self._at:
            self.forget()
        self._at = turn

    def fetch(self, turn: Turn, micro: MicroBatch, *, alone: bool) -> Any:
        """Returns the micro-batch's batch, and sets the random state with which its first turn began."""
        if len(self._turns) == 1:
            return micro.fetch()
        first = id(micro) not in self._begin
        if first:
            self._begin[id(micro)] = random_state(self._rig.device)
        if not alone:
            self.values = {}
            if not first:
                set_random_state(self._begin[id(micro)], self._rig.device)
            return micro.fetch()
        if not self._batch:
            self._batch.append(self._again(turn, micro) if turn is not self._turns[0] else micro.fetch())
        return self._batch[0]

    def end(self, turn: Turn) -> None:
        """Ends a turn after its backwards."""
        if turn is self._turns[-1]:
            self.forget()

    def forget(self) -> None:
        """Releases tensors; they are made again if a turn still needs them."""
        self.values = {}
        self._batch.clear()

    def _again(self, at: Turn, micro: MicroBatch) -> Any:
        """Makes the batch and what earlier turns shared again; random state and buffers stay as they are now."""
        now, moving = random_state(self._rig.device), BufferSnapshot(self._rig.nets, self._rig.job)
        moving.keep()
        set_random_state(self._begin[id(micro)], self._rig.device)
        batch = micro.fetch()
        for turn in self._turns:
            if turn is at:
                break
            losses_of(self._rig, turn, batch, self.values, may_be_empty=bool(micro.ids))
        moving.restore()
        set_random_state(now, self._rig.device)
        return batch
