"""Recovery: a window whose memory runs out is put back to its start and done again, in smaller micro-batches.

First once more as it was: what has fitted before may have failed from outside, or in an allocator that does not search
its pool again after it waited for a block of another stream (pytorch/pytorch issue 189504); the same split learns the
same bit for bit. Then the micro-batches from the failed one on are halved by their padded cost; those before it just
fitted. The size found is kept for the windows that follow, and grows back after a while. A sample that does not fit
alone ends the run, or is left out where the person said so.

Ranks in lockstep cannot repeat a window: they start again from their last checkpoint with ``ReducedLimits``,
at once, since a try as it was costs another start; their micro-batches do not grow back.

What is put back: random numbers (each micro-batch has its own streams), buffers and modes (``buffer_snapshot``),
gradients (none at a turn's start), the scaler. A turn that has stepped is not repeated: the retry begins at the turn
that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from torch import Tensor
from torch.optim import Optimizer

from memfit.apply.buffer_snapshot import BufferSnapshot, CannotRepeatError
from memfit.apply.losses import MicroBatch
from memfit.apply.random_state import random_state, set_random_state
from memfit.apply.train_state import TrainState
from memfit.apply.window import Attempt, Guard, TurnGradients
from memfit.engine.collectives import RanksOutOfMemoryError, gather
from memfit.errors import describe, message_of
from memfit.job import Job
from memfit.torch_compat.batch_norm import BatchNormBase
from memfit.torch_compat.grad_scaler import forget_optimizers, has_infinity
from memfit.train.launch import memory_limit
from memfit.train.recovery.early_units import KEPT_TRIES, Make, make_with_retries
from memfit.train.recovery.exactly_once import ExactlyOnce, TornStepError
from memfit.train.recovery.failure import (
    Failure,
    Ids,
    allocator_retries,
    clear_frames,
    describe_request,
    give_back,
    held_bytes,
    requested_bytes,
)
from memfit.train.recovery.giving_up import GIVES_UP, NothingLeftError, SampleTooLargeError, give_up_together
from memfit.train.recovery.part_sizes import PartSizes
from memfit.train.recovery.reduced_limits import NO_REDUCTION, ReducedLimits, StartAgainError
from memfit.train.recovery.samples_in_words import samples_in_words

IN_A_ROW = 8
"""Samples, none larger than what has fitted, that are left out one after another before they are no longer to blame."""


class Recovery:
    """Repeats what ran out of memory. One for a run.

    Args:
        remake: a micro-batch of these samples, for the window at hand.
        cost: padded units of these samples together.
        largest: padded units of the plan's largest micro-batch.
        skips: whether a sample that does not fit alone is left out.
        limits: what is smaller from the start.
        on_failure: called with each failure, while gradients are still held.
        check: called with the gradients of a turn before its step; it may raise.
        has_grown: gives an error where memory failed because of what is held between windows.
        held_before: bytes of the process before the job was built.
        changing: names of tensors that forwards are known to change.
    """

    def __init__(
        self,
        train_state: TrainState,
        *,
        remake: Callable[[Ids], MicroBatch],
        cost: Callable[[Ids], int],
        largest: int,
        skips: bool = False,
        limits: ReducedLimits = NO_REDUCTION,
        on_failure: Callable[[Failure], None] = lambda failure: None,
        check: Callable[[TurnGradients], None] = lambda made: None,
        has_grown: Callable[[Failure], Exception | None] = lambda failure: None,
        held_before: int = 0,
        changing: Collection[str] = (),
    ) -> None:
        self.retries = 0
        """Failures of this window."""
        self.skipped: list[int] = []
        """Samples of this window that were left out."""
        self.thrashes = 0
        """Times that the allocator had to give its cache back in this window."""
        self._in_a_row: list[int] = []
        """Samples no larger than what has fitted that were left out since one fitted."""
        self._fitted = 0
        """Padded units of the largest micro-batch that has fitted."""
        self._state, self._remake, self._cost = train_state, remake, cost
        self._skips, self._on_failure = skips, on_failure
        self._check, self._has_grown, self._held_before = check, has_grown, held_before
        self._once_alone = frozenset(limits.alone)
        self._in_step = train_state.engine.syncs_in_backward and train_state.engine.world > 1
        self._buffers = BufferSnapshot(train_state.nets, train_state.job, changing)
        self._several = len(train_state.job.turns(list(train_state.optimizers))) > 1
        modules = [module for net in train_state.nets.values() for module in net.modules()]
        least = 2 if any(isinstance(module, BatchNormBase) for module in modules) else 1
        self.sizes = PartSizes(cost, largest, least=least, limits=limits, grows=not self._in_step)
        self._part, self._index = "", -1
        self._in_turn = False
        """Whether a turn of the window has begun, with a snapshot of its start."""
        self._on_card = train_state.device.type == "cuda"
        self._allocator_retries = allocator_retries(train_state.device)
        self._apply_once = ExactlyOnce(self._relieve)
        once = self._stepped_together if train_state.engine.syncs_in_step else self._stepped_once
        self.guard = Guard(gradients=self._gradients, once=once, norms=True)

    def parts(self, planned: Sequence[Ids]) -> list[Ids]:
        """A window's micro-batches, cut to the size that fits now, without samples that never fit."""
        if self.sizes.left_out:
            self.skipped += [i for ids in planned for i in ids if i in self.sizes.left_out]
        return self.sizes.parts_of(planned)

    def micro_batches(self, planned: Sequence[Ids], make: Make) -> list[MicroBatch]:
        """A window's micro-batches, cut to the size that fits now."""
        parts = self.parts(planned)
        if type(self._state.job).units is Job.units:  # nothing is collated before its forward
            return [make(ids, True) for ids in parts]
        given_up, made = None, []
        try:
            tries = 0 if self._in_step else KEPT_TRIES
            made = make_with_retries(parts, make, self._failed_early, self._smaller_parts, tries)
        except GIVES_UP as error:
            if self._state.engine.world == 1 or self._in_step:
                raise
            given_up = error
        if self._state.engine.world > 1 and not self._in_step:
            give_up_together(self._state.engine, given_up)
        return made

    def _failed_early(self, error: Exception, number: int, ids: Ids) -> Failure:
        with memory_limit.lifted():
            self._part, self.retries = "fetch", self.retries + 1
            self.sizes.failed()
            failure = replace(self._failure(error, []), micro_batch=number, ids=ids)
            clear_frames(error)
            self._on_failure(failure)
            give_back(self._state.device)
        return failure

    def _smaller_parts(self, parts: Sequence[Ids], failure: Failure) -> list[Ids]:
        """As ``_smaller``, of samples that are in no micro-batch yet.

        Raises:
            StartAgainError: ranks synchronise in the backward, and have as many micro-batches each.
        """
        if self._in_step:
            raise self._start_again(failure, failure.ids)
        most = self.sizes.half(failure.ids)
        if most is None:
            self._without([], failure, failure.ids)
            return [ids for ids in parts if ids != failure.ids]
        self.sizes.cap = self.sizes.at_most(most)
        rest = parts[failure.micro_batch :]
        return [*parts[: failure.micro_batch], *(part for ids in rest for part in self.sizes.cut(ids, most))]

    def mark(self, part: str) -> None:
        """Notes which part of the window begins."""
        self._part = part
        if part == "fetch":
            self._index += 1

    def begin(self) -> None:
        """A window begins."""
        self.retries, self.skipped, self.thrashes = 0, [], 0
        self._part, self._in_turn = "fetch", False

    def end(self) -> None:
        """A window is done. After many without a failure micro-batches grow; after an allocator's retry they shrink."""
        if self._on_card:
            climbed = allocator_retries(self._state.device)
            self.thrashes, self._allocator_retries = climbed - self._allocator_retries, climbed
        if not self.retries:
            self.sizes.window_fitted(thrashed=self.thrashes > 0)

    @property
    def part(self) -> str:
        """The part of the window that began last."""
        return self._part

    @property
    def can_go_back(self) -> bool:
        """Whether this turn's forward has changed nothing of which there is no copy."""
        return not (self._in_turn and self._buffers.changed())

    def go_back(self) -> None:
        """Puts a window of which no turn has stepped back to its start."""
        self._restore()

    def _gradients(self, attempt: Attempt, parts: Sequence[MicroBatch]) -> TurnGradients:
        self._buffers.keep()
        self._in_turn = True
        random = random_state(self._state.device) if self._several else None
        again = not self.sizes.growing
        while True:
            self._index = -1
            try:
                made = attempt(parts)
                self._check(made)
                self._buffers.learn()
                for micro in parts:
                    if micro.counts and micro.ids:
                        self._in_a_row, self._fitted = [], max(self._fitted, micro.padded_units)
                return made
            except Exception as error:
                if not memory_limit.is_memory_failure(error):
                    raise
                with memory_limit.lifted():
                    failure = self._failure(error, parts)
                    here = not isinstance(error, RanksOutOfMemoryError) or self._state.engine.rank in error.ranks
                    clear_frames(error)
                    self._on_failure(failure)
            if self._in_step:
                raise self._start_again(failure, self._failed_part(parts, failure)[1])
            self.retries += 1
            self.sizes.failed()
            with memory_limit.lifted():
                self._restore()
                if random is not None:
                    set_random_state(random, self._state.device)
            if again:
                again = False
                continue
            self.sizes.growth_failed()
            parts = self._smaller_on(parts, failure, here=here)

    def _stepped_once(
        self, act: Callable[[], None], optimizer: Optimizer | None, further: Sequence[Tensor] = ()
    ) -> None:
        """A step, which a scaler leaves out where the gradients overflowed.

        Raises:
            TornStepError: memory ran out, and what is left of the step cannot be done alone.
            StartAgainError: the same, on one of several ranks.
        """
        scaler = self._state.scaler
        if scaler is not None and optimizer is not None and has_infinity(scaler, optimizer):
            return
        try:
            self._apply_once(act, optimizer, further)
        except TornStepError as error:
            if self._state.engine.world == 1:
                raise
            said = f"an optimizer step was cut short by memory ({error})"
            raise StartAgainError(said, ReducedLimits(most=self.sizes.halved())) from error

    def _stepped_together(
        self, act: Callable[[], None], optimizer: Optimizer | None, further: Sequence[Tensor] = ()
    ) -> None:
        """A step in which ranks wait for each other: one that fails is not tried again, since the others have gone on.

        Raises:
            StartAgainError: memory ran out.
            TornStepError: the same, on one rank.
        """
        try:
            act()
        except Exception as error:
            if not memory_limit.is_memory_failure(error):
                raise
            with memory_limit.lifted():
                failure = self._failure(error, [])
                clear_frames(error)
                self._on_failure(failure)
            said = f"out of memory in {failure.part} ({describe_request(failure, self._held_before)})"
            if self._state.engine.world == 1:
                raise TornStepError(said) from error
            raise StartAgainError(said, ReducedLimits(most=self.sizes.halved())) from error

    def _smaller_on(self, parts: Sequence[MicroBatch], failure: Failure, *, here: bool) -> Sequence[MicroBatch]:
        """As ``_smaller`` on the ranks whose memory ran out. Where one of them gives up, all of them do."""
        if self._state.engine.world == 1:
            return self._smaller(parts, failure)
        given_up = None
        if here:
            try:
                parts = self._smaller(parts, failure)
            except GIVES_UP as error:
                given_up = error
        give_up_together(self._state.engine, given_up)
        return parts

    def _smaller(self, parts: Sequence[MicroBatch], failure: Failure) -> list[MicroBatch]:
        """The failed micro-batch and those after it, cut; the ones before as they were."""
        at, failed = self._failed_part(parts, failure)
        most = self.sizes.half(failed)
        if most is None:
            return self._without(parts, failure, failed)
        self.sizes.cap = self.sizes.at_most(most)
        cut: list[MicroBatch] = list(parts[:at])
        for micro in parts[at:]:
            if not micro.counts or self._cost(micro.ids) <= most:
                cut.append(micro)
            else:
                cut += [self._remake(ids) for ids in self.sizes.cut(micro.ids, most)]
        return cut

    @staticmethod
    def _failed_part(parts: Sequence[MicroBatch], failure: Failure) -> tuple[int, Ids]:
        """(the failed micro-batch's number, its samples)."""
        at = min(max(failure.micro_batch, 0), len(parts) - 1)
        return at, parts[at].ids if parts else ()

    def _start_again(self, failure: Failure, failed: Ids) -> StartAgainError:
        """What all ranks start again with, after memory ran out with these samples."""
        said = f"out of memory in {failure.part} ({describe_request(failure, self._held_before)})"
        return StartAgainError(said, self._reduced_limits(failure, failed))

    def _reduced_limits(self, failure: Failure, failed: Ids) -> ReducedLimits:
        """What is to be smaller when ranks start again.

        Raises:
            GrownMemoryError: nothing, since memory ran out because of what has grown between windows.
        """
        grown = self._has_grown(failure)
        if grown is not None:
            raise grown
        most = self.sizes.half(failed)
        if most is not None:
            return ReducedLimits(most=self.sizes.at_most(most))
        if failed and not self._once_alone.issuperset(failed):
            return ReducedLimits(most=self.sizes.at_most(self._cost(failed)), alone=failed)
        self._without([], failure, failed)
        return ReducedLimits(left_out=failed)

    def _without(self, parts: Sequence[MicroBatch], failure: Failure, failed: Ids) -> list[MicroBatch]:
        """The window without a sample that does not fit alone, where the person said so."""
        grown = self._has_grown(failure)
        if grown is not None:
            raise grown
        if not failed:
            raise NothingLeftError(f"memory ran out in {failure.part} without a sample: {failure.message}")
        if not self._skips:
            memory_limit.lift()
            request = describe_request(failure, self._held_before)
            raise SampleTooLargeError(
                f"{samples_in_words(self._state.job, failed, self._cost, self._remake)} not fit alone: "
                f"memory ran out in {failure.part} ({request})"
            )
        if self._cost(failed) <= self._fitted:
            self._in_a_row += failed
        if len(self._in_a_row) > IN_A_ROW:
            raise NothingLeftError(
                f"memory ran out in {failure.part} with samples {', '.join(map(str, self._in_a_row))}, one after "
                f"another ({describe_request(failure, self._held_before)}): no sample is to blame"
            )
        self.skipped += failed
        return [micro for micro in parts if micro.ids != failed]

    def _failure(self, error: Exception, parts: Sequence[MicroBatch]) -> Failure:
        """The failure as the rank saw it on which memory ran out. Where all ranks raise, all of them call this."""
        ids = parts[self._index].ids if 0 <= self._index < len(parts) else ()
        own = Failure(
            part=self._part,
            micro_batch=self._index,
            ids=ids,
            requested_bytes=requested_bytes(message_of(error)),
            held_bytes=held_bytes(self._state.device),
            message=describe(error),
            rank=self._state.engine.rank,
        )
        if not isinstance(error, RanksOutOfMemoryError):
            return own
        ranks = gather(self._state.engine, own)
        return own if self._state.engine.rank in error.ranks else ranks[error.ranks[0]]

    def _relieve(self, error: BaseException) -> None:
        with memory_limit.lifted():
            clear_frames(error)
            give_back(self._state.device)

    def _restore(self) -> None:
        for net in self._state.nets.values():
            for parameter in net.parameters():
                parameter.grad = None
        for optimizer in self._state.optimizers.values():
            self._state.engine.zero_grad(optimizer)
        changed: tuple[str, ...] = ()
        try:
            if self._in_turn:
                self._buffers.restore()
        except CannotRepeatError as error:
            changed = error.names
        names = sorted({name for rank in gather(self._state.engine, changed) for name in rank})
        if names:
            raise CannotRepeatError(names)
        if self._state.scaler is not None:
            forget_optimizers(self._state.scaler)
        give_back(self._state.device)
