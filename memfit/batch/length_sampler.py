"""LengthBatchSampler: batches of samples of many lengths, by padded cost, the same number on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from memfit.batch.cost import PaddedCost
from memfit.batch.lengths import as_lengths
from memfit.batch.packing import EpochPlan, Remainder, length_classes, plan_epoch
from memfit.errors import InputError

_DIGIT, _STEP_BITS = 64, 40

Stretches = tuple[tuple[int, int], ...]
"""(world, steps) of each part of an epoch that was given in one world, oldest first."""


class LengthBatchSampler(DistributedSampler):
    """Yields lists of sample ids: one batch a step for this rank, within ``budget`` of padded cost.

    Order is a function of (seed, epoch) alone. Every sample comes once an epoch over all ranks, every rank has as many
    batches, and the batches of one step hold neighbouring lengths on all ranks, so that no rank waits: this changes
    the order of training against a plain shuffle. ``noise=0.01`` mixes samples whose lengths are within 1 % (padding
    about 0.4 % on lognormal lengths of 0.3 to 30 s), ``noise=0.03`` within 3 % (about 1.4 %).

    Use it as ``DataLoader(dataset, batch_sampler=...)``, also with torchdata's StatefulDataLoader, and with Accelerate
    (``every_rank=True``, since Accelerate deals out batches itself). For Lightning use ``batch_loader``. Call
    ``set_epoch`` before each epoch where the framework does not.

    Args:
        lengths: length of every sample (array, list or column), in the unit of the cost.
        budget: the most that one batch may cost; padded units with the default ``cost``.
        max_items: the most samples of a batch; None: no cap.
        noise: relative width of the length classes within which samples are mixed; 0: equal lengths only.
        too_long: what to do with a sample that alone is over the budget: "error", or "drop" (see ``dropped``).
        remainder: what to do in the last step if there are fewer samples left than ranks and no batch can be split:
            "error", "repeat" or "drop" samples (counted and named by ``plan``), or give "empty" batches.
        every_rank: yield the batches of all ranks in turn, for a library that gives each rank its own.
        rank: by default that of torch.distributed where it is initialised, else 0.
        world: by default that of torch.distributed where it is initialised, else 1.

    Raises:
        InputError: lengths that are not positive, a sample over the budget, a rank outside the world.
    """

    def __init__(
        self,
        lengths: Sequence[float] | np.ndarray,
        budget: float,
        *,
        cost: PaddedCost | None = None,
        max_items: int | None = None,
        noise: float = 0.0,
        seed: int = 0,
        too_long: str = "error",
        remainder: Remainder = "error",
        every_rank: bool = False,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        self.lengths = as_lengths(lengths)
        self.cost, self.budget = cost or PaddedCost(), budget
        self.max_items, self.noise, self.remainder, self.every_rank = max_items, noise, remainder, every_rank
        self.seed, self.epoch = seed, 0
        self.num_replicas, self.rank = _place(rank, world)
        self._check(too_long)
        self.dropped = np.flatnonzero(self.cost.of(1, self.lengths) > budget)
        """Ids of samples that alone are over the budget, left out because ``too_long`` is "drop"."""
        if len(self.dropped) and too_long == "error":
            raise self._too_long()
        self._classes = length_classes(self.lengths, noise)
        self._start: Stretches = ()
        """What the next iteration has behind it."""
        self._done: Stretches = ()
        """The samples that are already drawn; the last stretch grows while this world iterates."""
        self._planned: tuple[tuple[int, Stretches], EpochPlan] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        plan, behind, first = self.plan(), self._others(self._start), self._steps(self._start)
        self._done, self._start = self._start, ()
        return self._batches(plan, behind, first, self.epoch)

    def _batches(self, plan: EpochPlan, behind: Stretches, first: int, epoch: int) -> Iterator[list[int]]:
        ranks = range(self.num_replicas) if self.every_rank else (self.rank,)
        for step in range(first, plan.steps):
            for rank in ranks:
                if self.epoch == epoch and rank == ranks[-1]:
                    self._done = (*behind, (self.num_replicas, step + 1))
                yield plan.ids(step, rank).tolist()

    def __len__(self) -> int:
        """Batches that the next iteration yields."""
        steps = self.plan().steps - self._steps(self._start)
        return steps * self.num_replicas if self.every_rank else steps

    @property
    def sampler(self) -> LengthBatchSampler:
        """Itself: where Lightning and Accelerate look for the ``set_epoch`` of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch; another one than the present starts at its beginning."""
        if epoch != self.epoch:
            self.epoch, self._start, self._done = epoch, (), ()

    def plan(self) -> EpochPlan:
        """The batches of the next iteration on all ranks; of what is left, after a change of the world size."""
        return self._plan_behind(self._others(self._start))

    def state_dict(self) -> dict[str, int]:
        """One integer that holds the epoch and the steps given so far; the same on every rank.

        A DataLoader with workers draws batches ahead of training: use StatefulDataLoader, which accounts for that, or
        ``state_at`` with the number of steps that were trained.
        """
        return {"state": self._encode(self._done)}

    def state_at(self, step: int) -> dict[str, int]:
        """The state after ``step`` steps of this world in the present epoch."""
        behind = self._others(self._done)
        return {"state": self._encode((*behind, (self.num_replicas, step)) if step else behind)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Takes up a state, also one of another world size: what is left is then dealt out anew."""
        rest, self.epoch = divmod(state_dict["state"], 1 << _DIGIT)
        stretches = []
        while rest:
            rest, stretch = divmod(rest, 1 << _DIGIT)
            stretches.append(divmod(stretch, 1 << _STEP_BITS))
        self._start = self._done = tuple(stretches)

    def _encode(self, done: Stretches) -> int:
        """Lowest 64 bits: the epoch; then for each stretch 64 bits: world · 2^40 + steps. A done epoch is the next."""
        if self._steps(done) and self._steps(done) >= self._plan_behind(self._others(done)).steps:
            return self.epoch + 1
        state = 0
        for world, steps in reversed(done):
            state = state << _DIGIT | world << _STEP_BITS | steps
        return state << _DIGIT | self.epoch

    def _others(self, done: Stretches) -> Stretches:
        """Stretches before this world's own, from which its plan follows."""
        return done[:-1] if done and done[-1][0] == self.num_replicas else done

    def _steps(self, done: Stretches) -> int:
        """Steps of this world's own stretch."""
        return done[-1][1] if len(self._others(done)) < len(done) else 0

    def _plan_behind(self, behind: Stretches) -> EpochPlan:
        key = (self.epoch, behind)
        if self._planned is None or self._planned[0] != key:
            self._planned = (key, self._plan(*key))
        return self._planned[1]

    def _plan(self, epoch: int, behind: Stretches) -> EpochPlan:
        left = None
        if len(self.dropped):
            left = np.delete(np.arange(len(self.lengths)), self.dropped)
        for stretch, (world, steps) in enumerate(behind):
            left = self._plan_of(left, epoch, stretch, world).left_after(steps)
        return self._plan_of(left, epoch, len(behind), self.num_replicas)

    def _plan_of(self, ids: np.ndarray | None, epoch: int, stretch: int, world: int) -> EpochPlan:
        return plan_epoch(
            self._classes,
            ids,
            cost=self.cost,
            budget=self.budget,
            max_items=self.max_items,
            world=world,
            seed=(self.seed, epoch, stretch),
            remainder=self.remainder,
        )

    def _check(self, too_long: str) -> None:
        if too_long not in ("error", "drop"):
            raise InputError(f"too_long={too_long!r}", "not one of its values", "write 'error' or 'drop'")
        if self.remainder not in ("error", "empty", "repeat", "drop"):
            raise InputError(
                f"remainder={self.remainder!r}", "not one of its values", "write 'error', 'empty', 'repeat' or 'drop'"
            )
        if self.max_items is not None and self.max_items < 1:
            raise InputError(f"max_items={self.max_items}", "a batch holds a sample", "write 1 or more, or None")
        if not 0 <= self.noise < 1:
            raise InputError(f"noise={self.noise}", "not a part of a length", "write 0, 0.01 or 0.03, say; below 1")
        if self.seed < 0:
            raise InputError(f"seed={self.seed}", "a seed is not negative", "write 0 or more")

    def _too_long(self) -> InputError:
        worst = int(self.dropped[np.argmax(self.lengths[self.dropped])])
        need = float(self.cost.of(1, self.lengths[worst]))
        others = f", the longest of {len(self.dropped)} such samples" if len(self.dropped) > 1 else ""
        return InputError(
            f"sample {worst}{others}",
            f"its length {self.lengths[worst]:g} needs {need:g} and the budget of a batch is {self.budget:g}",
            f"write a budget of {need:g} or more, or too_long='drop' to leave such samples out by name",
        )


def batch_loader(
    dataset: Dataset[Any], sampler: LengthBatchSampler, *, collate_fn: Any = default_collate, **options: Any
) -> DataLoader:
    """A DataLoader that Lightning leaves as it is, and to whose sampler it passes the epoch on.

    Lightning shards every loader again whose ``sampler`` is not a DistributedSampler, which holds for every loader
    with a ``batch_sampler``. Here the batch sampler itself is the sampler, and a batch of ids the index.
    ``options`` are DataLoader's (num_workers, pin_memory …).
    """
    return DataLoader(_BatchIndexed(dataset), sampler=sampler, batch_size=None, collate_fn=collate_fn, **options)


class _BatchIndexed(Dataset):
    """A data set whose index is a list of ids."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, ids: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(ids))
        return [self.dataset[index] for index in ids]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


def _place(rank: int | None, world: int | None) -> tuple[int, int]:
    """(world, rank), from torch.distributed where they are not given."""
    started = dist.is_available() and dist.is_initialized()
    if world is None:
        world = dist.get_world_size() if started else 1
    if rank is None:
        rank = dist.get_rank() if started else 0
    if not 0 <= rank < world:
        raise InputError(f"rank {rank} of {world}", "ranks count from 0 to world - 1", f"write a rank below {world}")
    return world, rank
