"""What every engine can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
        """The engine's name, as --engine writes it."""

    @property
    def rank(self) -> int:
        """This process's place, from 0."""

    @property
    def world(self) -> int:
        """Ranks that train together."""

    @property
    def data_rank(self) -> int:
        """Which share of the window this rank takes, from 0; ranks that hold parts of a layer take the same."""

    @property
    def data_world(self) -> int:
        """Shares of a window."""

    @property
    def context_ranks(self) -> int:
        """Ranks that each hold a part of every sequence of a share, and compute the losses of that part; 1: all of a
        share is on one rank, or on several that compute the same."""

    @property
    def stages(self) -> int:
        """Stages of a pipeline that the trained nets are cut into; 1: every rank runs forwards whole. Of several, a
        window goes through ``memfit.engine.pipeline.Pipeline.run_stages``."""

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks' mesh: ``data`` where all take samples of their own alike, else as ``MeshShape`` names its
        dimensions. None on one rank."""

    @property
    def syncs_in_backward(self) -> bool:
        """Whether collectives run inside forward and backward: then every rank runs as many micro-batches, and a rank
        whose memory runs out ends, for all to start again with less (``memfit.train.recovery.reduced_limits``)."""

    @property
    def sharded_state(self) -> bool:
        """Whether ranks hold parts of the state: then each writes its own into a checkpoint."""

    @property
    def parts_on_host(self) -> bool:
        """Whether a rank's parts of parameters, and what is made of them, are in the host's memory beside a card."""

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

    def accumulating(self, nets: Nets, last: bool, shared: bool = True) -> AbstractContextManager[Any]:
        """A context for the forward and backward of one micro-batch.

        Args:
            last: whether it is the rank's last micro-batch of the window.
            shared: whether ranks share the gradients of this turn; False where each rank trains its nets by itself
                (``Job.unsynchronised``).
        """

    def divide_sequences(self, job: Job, nets: Nets, batches: Sequence[Any]) -> AbstractContextManager[list[Any]]:
        """A context for the forwards and backwards of micro-batches of one shape, where ``context_ranks`` is above 1:
        gives the batches with this rank's part of their sequences, in a list that may be emptied.

        Raises:
            InputError: the sequences cannot be divided.
        """

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

    def categorised(self, nets: Nets) -> Iterator[tuple[Tensor, str]]:
        """Tensors that the engine holds besides parameters and their ``grad``, each with its category of memory."""

    def accumulated(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Tensors whose ``grad`` holds the gradients of a window's earlier micro-batches in a trace of one more."""

    def local_step(self, optimizer: Optimizer) -> AbstractContextManager[Callable[[], None]]:
        """Around a step that is traced alone: the ``grad`` of what ``stepped`` gives are its gradients. Gives a
        function that steps by them without collectives."""

    def stepped_parameters(self, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, nn.Parameter]:
        """The parameters that an optimizer steps on all ranks together, by name.

        Args:
            names: of the nets' parameters, by their ``id``.
        """

    def full_gradients(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Gradients of these parameters as full tensors, after ``reduce`` and before ``step``; every rank calls it."""

    def full_weights(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Copies of these parameters as full tensors; every rank calls it."""

    def put_weights(self, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
        """Writes full tensors into what this rank holds of the parameters; those without a tensor stay."""

    def put_state(
        self,
        nets: Nets,
        optimizers: Mapping[str, Optimizer],
        state: Mapping[str, Any],
        stepped: Mapping[str, Sequence[nn.Parameter]],
    ) -> None:
        """Writes the state dicts of one rank, ``nets`` and ``optimizers`` by name, into what this rank holds.

        Args:
            stepped: parameters of each optimizer, in the order of its state dict.
        """

    def state_of_parts(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
        """``nets`` and ``optimizers`` as torch.distributed.checkpoint writes and reads them.

        Full tensors and parts of them, which are the engine's own. Names, shapes and nesting are the same under every
        engine. Every parameter's optimizer state is there, made where there was none.
        """

    def load_state_of_parts(self, nets: Nets, optimizers: Mapping[str, Optimizer], state: Mapping[str, Any]) -> None:
        """Takes over what was read into the tensors of ``state_of_parts``."""

    def net_of_parts(self, net: nn.Module) -> dict[str, Any]:
        """A net's state_dict, or its average's, as in ``state_of_parts``."""

    def load_net_of_parts(self, net: nn.Module, state: Mapping[str, Any]) -> None:
        """Takes over what was read into the tensors of ``net_of_parts``."""

    def share_buffers(self, nets: Nets) -> None:
        """Buffers of trained nets (running statistics) become rank 0's, as a checkpoint of rank 0 holds them."""
