"""What every engine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from memfit.job import Job, Nets


class Engine(Protocol):
    """A job's nets on one or many ranks. Frozen: what changes lives in the nets and the process group.

    The order of a window: for each turn, every micro-batch's forward and backward inside ``accumulating``; ``prepare``
    and ``reduce``, after which gradients are the sum over ranks, whatever the engine's own collectives do; ``clip``;
    ``step``. A loss is divided by the units of all ranks before its backward, so a sum is what is wanted. What ranks
    tell each other beside is in ``ranks``.
    """

    @property
    def name(self) -> str:
        """As --engine writes it."""

    @property
    def rank(self) -> int:
        """This process's place, from 0."""

    @property
    def world(self) -> int:
        """Data-parallel ranks."""

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks' mesh; its dimension ``data`` holds those that share a window. None on one rank."""

    @property
    def syncs_in_backward(self) -> bool:
        """Whether collectives run inside forward and backward: then every rank runs as many micro-batches, and a rank
        whose memory runs out ends, for all to start again with less (``memfit.train.recovery.reduced_limits``)."""

    @property
    def spread(self) -> bool:
        """Whether ranks hold parts of the state: then each writes its own into a checkpoint."""

    @property
    def syncs_in_step(self) -> bool:
        """Whether a step runs collectives: one that failed on one rank can then not be finished by that rank alone."""

    def place(self, job: Job, nets: Nets) -> Nets:
        """The nets as this engine trains them, with rank 0's values; called before the optimizers are made.

        Raises:
            InputError: the engine cannot carry the job; names the reason and an engine that can.
        """

    def averages(self, job: Job, nets: Nets) -> Nets:
        """Copies of the trained nets that this rank averages into; called before ``place``. Empty: it keeps none."""

    def check(self, job: Job, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """Raises InputError where the engine cannot carry these optimizers or turns."""

    def divide(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """The optimizers, which were checked, as this engine steps them; before anything has kept their groups."""

    def accumulating(self, nets: Nets, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward of one micro-batch; ``last`` of this rank's window."""

    def prepare(self, parameters: Sequence[nn.Parameter]) -> Any:
        """Makes all the memory that ``reduce`` needs, which then cannot fail on one rank alone."""

    def reduce(self, prepared: Any) -> None:
        """Gradients become the sum over ranks. One that no rank has stays None."""

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The tensors in which this rank holds the gradients, once they are reduced; writing to them changes those."""

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scales the whole gradient, of all ranks' shards, to at most this norm; gives the norm before."""

    def step(self, optimizer: Optimizer) -> None:
        """One step of an optimizer."""

    def stepped(self, optimizer: Optimizer) -> list[Tensor]:
        """The weights that a step of this optimizer writes on this rank."""

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Lets go of the gradients, whole or begun."""

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """A net's state_dict with whole tensors; every rank calls it, in the same order."""

    def parts(self, net: nn.Module) -> list[Tensor]:
        """What this rank holds of a net's parameters, or of its average's, in their order."""

    def share_buffers(self, nets: Nets) -> None:
        """Buffers of trained nets (running statistics) become rank 0's, as a checkpoint of rank 0 holds them."""
