"""Job: what is trained. A person subclasses ``Job`` and writes nets, optimizers, a batch and a loss."""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from memfit.errors import InputError, describe
from memfit.settings import Settings, is_of_kind, kind_in_words

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

Nets = dict[str, "nn.Module"]
Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one micro-batch holds: ``items`` samples, each ``length`` long (None: samples have no length)."""

    items: int
    length: int | None = None

    @property
    def units(self) -> int:
        """Padded units of the micro-batch: items x length, or items where samples have no length."""
        return self.items * (self.length or 1)

    def __str__(self) -> str:
        return f"{self.items}x{self.length}" if self.length else str(self.items)


class Loss(typing.NamedTuple):
    """A loss before normalisation: the sum over the valid units of a micro-batch, and how many there are.

    memfit divides the sums of all micro-batches (and ranks) of a window by the units of the whole window.
    """

    sum: Tensor
    """Scalar: the sum of the loss over the valid units."""
    units: int | Tensor
    """Valid units (samples, frames or tokens) in the sum."""


Losses = Loss | tuple["Tensor", "int | Tensor"] | Mapping[str, "Loss | tuple[Tensor, int | Tensor]"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One part of a window: losses, then one step of the optimizers that it names.

    A window runs its turns in order; each turn sees every micro-batch, then steps. ``loss(nets, batch, shared)``:
    ``shared`` is a dict for what the turns of one micro-batch have in common (a generator's output, say). It is kept
    from turn to turn while a window has a single micro-batch; otherwise it comes empty, with the random state of the
    micro-batch's first turn, so that what is computed again comes out the same.
    """

    name: str
    loss: Callable[[Nets, Any, dict[str, Any]], Losses]
    optimizers: tuple[str, ...]

    def __post_init__(self) -> None:
        write = "write memfit.Turn(name='loss', loss=self.my_loss, optimizers=('adamw',))"
        if not callable(self.loss):
            raise InputError(f"turn {self.name!r}", f"its loss is a {type(self.loss).__name__}, not a function", write)
        try:
            if not _has_three_parameters(self.loss):
                inspect.signature(self.loss).bind("nets", "batch", "shared")
        except TypeError as error:
            takes = "write a loss that takes (nets, batch, shared)"
            raise InputError(f"turn {self.name!r}", f"its loss: {error}", takes) from None
        except ValueError:  # a function in C does not tell its parameters
            pass
        if isinstance(self.optimizers, str) or not isinstance(self.optimizers, Sequence):
            raise InputError(f"turn {self.name!r}", f"optimizers = {self.optimizers!r} is not a tuple of names", write)


def _has_three_parameters(loss: Callable[..., Any]) -> bool:
    """Whether a plain function or method takes exactly three arguments by position. Turns are made in every window, and
    ``inspect.signature`` takes as long as a small layer."""
    bound = type(loss) is MethodType
    function: Any = loss.__func__ if isinstance(loss, MethodType) else loss
    if type(function) is not FunctionType or vars(function):
        return False
    return function.__code__.co_argcount == 3 + bound and not function.__code__.co_kwonlyargcount


class Job(Settings):
    """What is trained. Annotated class attributes are settings, which ``--set name=value`` changes.

    Needed: ``nets``, ``optimizers``, ``batch`` and ``loss`` (or ``turns``). The rest has defaults. docs/job.md
    lists every attribute and method, with examples and recipes.

    Attributes:
        unit: what ``--micro-batch`` and ``--global-batch`` count; "samples".
        longest: length of the longest sample, in units; None where a sample is one unit.
        precision: fp32, bf16 or fp16; the last two mean autocast around the loss.
        autocasts_itself: whether the loss opens ``self.autocast(...)`` itself.
        checkpoint: none, or all: the job recomputes every module that ``checkpointable`` names.
        clip: largest norm of the gradients of one turn; None.
        zero_grad: after_step, or after_forward: when gradients are freed.
        ema: decay of an exponential moving average of the trained nets; None.
        wrapper: none, ddp or ddp_find_unused: what wraps the nets on one device too.
        windows: optimizer steps of ``memfit run`` without ``--windows``; 20.
        unsynchronised: nets that each rank trains by itself.
        allows_not_finite: whether a checkpoint may hold NaN or infinite numbers.
        causal_attention: whether every attention of the trained nets is causal, which context parallelism balances.
        validate_every: windows between validations; 10, and 0 for none.
        validates: whether there is a validation; set where ``validate`` is written.
        real_validation_batch: whether ``validation_batch`` loads real samples.
        ranges: the least and the most that a setting may be, by name.
        smaller_settings: settings that make the job smaller, and what each changes.
        validation_options: settings that make validation smaller, by a name for them.
        validation_smaller: settings that a run takes where validation does not fit.
        net_phases: phases that use a net, for nets that not every phase uses.
        upstream: how another project writes a setting or a choice of the plan.
    """

    unit: ClassVar[str] = "samples"
    """What --micro-batch and --global-batch count."""
    longest: int | None = None
    """Length of the longest item, in units; None where an item is one unit."""
    precision: Precision = "fp32"
    """The job's own default. bf16 and fp16 mean autocast around the loss (fp16 with a GradScaler)."""
    autocasts_itself: ClassVar[bool] = False
    """True where the job's loss opens ``self.autocast(...)`` around parts of itself."""
    checkpoint: str = "none"
    """The job's own default: none, or all (every module that ``checkpointable`` names)."""
    clip: float | None = None
    """Largest norm of the gradients of one turn's optimizers; None: not clipped."""
    zero_grad: Literal["after_step", "after_forward"] = "after_step"
    """When gradients are freed: right after the optimizer step, or only after the next forward."""
    ema: float | None = None
    """Decay of an exponential moving average of the trained nets, kept on rank 0; None: no average."""
    wrapper: Literal["none", "ddp", "ddp_find_unused"] = "none"
    """What is put around the trained nets on a single device too. ddp: DistributedDataParallel, which keeps buckets as
    large as the gradients; ddp_find_unused: the same with find_unused_parameters. ``memfit plan`` takes it off:
    memfit's own engines keep no buckets between windows."""
    windows: int = 20
    """Optimizer steps of ``memfit run`` without --windows."""
    unsynchronised: ClassVar[tuple[str, ...]] = ()
    """Nets that each rank trains by itself, on its own part of a window, stepped in turns of their own. On several
    ranks that is not what one rank learns: ``memfit verify`` names them."""
    causal_attention: ClassVar[bool] = False
    """Whether every attention of the trained nets is causal: context parallelism (``cp``) then gives each rank a part
    of the sequence's beginning and one of its end, so that all compute as much."""
    allows_not_finite: ClassVar[bool] = False
    """Whether checkpoints may hold NaN or infinite numbers in what is trained. Otherwise the run ends before it writes
    one, and the newest checkpoint is the last finite state."""
    validate_every: int = 10
    """Windows between validations of ``memfit run``, where ``validate`` is written; 0: none."""
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """The least and the most that a setting may be, by name. Other values are refused in a line that says so."""
    upstream: ClassVar[Mapping[str, str | Mapping[str, str]]] = {}
    """Of a job that stands for another project: what a setting or a choice of a plan is there, a key or a code line.

    ``{value}`` stands for the value and ``{variant}`` for what follows the slash of the job's name; or the line for
    each value. ``memfit plan`` prints it. Keys beside settings: micro_batch, accumulation, devices, engine,
    checkpointing, names of options, and ``recompute net.path``. A switch that covers every module which
    ``checkpointable`` names has ``{value}``; code that must be written has not."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "validation_levers" in vars(cls):
            write = "write validation_options = {name: settings}"
            raise InputError(f"{cls.__name__}.validation_levers", "its name is now validation_options", write)
        if "validate" in vars(cls) and "validates" not in vars(cls):
            cls.validates = True

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        for name, kind in _attribute_kinds().items():
            if not is_of_kind(value := getattr(self, name), kind):
                raise InputError(
                    f"{type(self).__name__}.{name} = {value!r}",
                    f"not {kind_in_words(kind)}",
                    f"write {name} = {getattr(Job, name)!r}, say",
                )
        for name in _METHODS:
            if not callable(value := getattr(self, name)):
                seen = f"{type(self).__name__}.{name} = {value!r}"
                raise InputError(seen, "it hides the method of that name", f"write def {name}(self, ...), or rename it")
            _check_parameters(type(self), name, value)
        for name, fine, wants in (
            ("longest", self.longest is None or self.longest >= 1, "1 or more"),
            ("clip", self.clip is None or self.clip > 0, "more than 0, or none"),
            ("ema", self.ema is None or 0 <= self.ema < 1, "at least 0 and less than 1, or none"),
            ("windows", self.windows >= 1, "1 or more"),
            ("validate_every", self.validate_every >= 0, "0 (no validation) or more"),
        ):
            if not fine:
                raise InputError(
                    f"{name}={getattr(self, name)}",
                    f"out of its range: {wants}",
                    f"write {name}={'none' if 'none' in wants else 1}, say",
                )
        for name, (least, most) in _checked_ranges(self).items():
            value = getattr(self, name)
            if not least <= value <= most:
                wants = f"{least} or more" if most == float("inf") else f"{least} to {most}"
                near = least if value < least else most
                raise InputError(f"{name}={value}", f"out of its range: {wants}", f"write {name}={near}, say")

    def nets(self) -> Nets:
        """The nets by name. Frozen nets have no parameter that requires a gradient.

        Made with the device as torch's default; where code that reads tensors' values fails so, on the CPU, and moved.
        """
        raise InputError(type(self).__name__, "the job has no nets()", "write nets(self) -> {'name': module}")

    def optimizers(self, nets: Nets) -> dict[str, Optimizer]:
        """The optimizers by name, over parameters of the trained nets."""
        raise InputError(
            type(self).__name__,
            "the job has no optimizers()",
            "write optimizers(self, nets) -> {'name': torch.optim...}",
        )

    def schedules(self, optimizers: Mapping[str, Optimizer], windows: int) -> Mapping[str, Any]:
        """Learning-rate schedulers by name for a run of so many windows, each stepped once a window; default none."""
        return {}

    def batch(self, shape: Shape) -> Any:
        """A made-up micro-batch of this shape: tensors on the current device, in any nesting of dict, list, tuple."""
        raise InputError(
            type(self).__name__, "the job has no batch()", "write batch(self, shape) -> tensors of shape.items samples"
        )

    def loss(self, nets: Nets, batch: Any) -> Losses:
        """The loss of a micro-batch as (sum, valid units), or several of them by name."""
        raise InputError(
            type(self).__name__, "the job has no loss", "write loss(self, nets, batch) -> (sum, units), or turns()"
        )

    def turns(self, optimizers: Sequence[str]) -> list[Turn]:
        """The turns of a window; by default one, with ``loss`` and every optimizer."""
        return [
            Turn(name="loss", loss=lambda nets, batch, shared: self.loss(nets, batch), optimizers=tuple(optimizers))
        ]

    def units(self, batch: Any) -> Mapping[str, int] | int | None:
        """Valid units of a micro-batch, known before its forward; by name where ``loss`` gives several.

        A number or a tensor of one number. None (the default): memfit takes them from the loss. Needed only where a
        window has several micro-batches and several losses that count different units.
        """
        return None

    def dataset(self) -> Sequence[Any]:
        """The samples, by index; what ``memfit run`` trains on. Or an iterable that can begin anew, as torch's
        IterableDataset: its samples are numbered by position."""
        raise InputError(
            type(self).__name__, "the job has no dataset()", "write dataset(self) -> a sequence of samples, to run it"
        )

    def collate(self, samples: Sequence[Any]) -> Any:
        """A micro-batch of these samples, as ``batch`` makes it; by default torch's own collation."""
        from torch.utils.data import default_collate

        try:
            return default_collate(list(samples))
        except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "equal size" not in str(error):
                raise
            write = "write collate(self, samples) -> a micro-batch, as batch() makes it"
            raise InputError(f"{type(self).__name__}.collate()", describe(error), write) from error

    def lengths(self) -> Sequence[int] | None:
        """Length of every sample of the data set, in units; None where a sample is one unit."""
        return None

    def validation_batch(self, shape: Shape) -> Any:
        """What ``validate`` is given; by default a batch of the training micro-batch's shape."""
        return self.batch(shape)

    def validation_on_host(self) -> Sequence[str]:
        """Keys of a validation batch that stay on the host, such as a whole video: ``validate`` moves parts of it."""
        return ()

    validation_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """What makes validation smaller and not otherwise: a name, and the settings that do it. The least costly first."""
    smaller_settings: ClassVar[Mapping[str, str]] = {}
    """Settings that make the job smaller, and what each changes: offered where nothing fits."""
    net_phases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Phases (train, validate) that use a net, for nets that not every phase uses."""
    validation_smaller: ClassVar[Mapping[str, Any]] = {}
    """Settings with which ``validate`` needs less memory; a run takes them where it does not fit."""
    validates: ClassVar[bool] = False
    """Whether there is a validation: True in a class that writes ``validate`` and does not say otherwise."""

    real_validation_batch: ClassVar[bool] = False
    """Whether ``validation_batch`` gives real samples. Where it does not, and there is no ``validation_dataset``, a run
    does not validate: metrics of made-up data say nothing."""

    def validation_dataset(self) -> Sequence[Any] | None:
        """The held-out samples that a run validates on, all of them each time; None (the default): none.

        A batch holds as many as a training micro-batch does. Metrics are averaged over batches, weighted by items.
        """
        return None

    def validation_collate(self, samples: Sequence[Any]) -> Any:
        """A batch of these validation samples, as ``validation_batch`` makes it; by default ``collate``'s."""
        return self.collate(samples)

    def validate(self, nets: Nets, batch: Any) -> Mapping[str, Any]:
        """Metrics of one validation batch, run without gradients in evaluation mode."""
        raise InputError(
            type(self).__name__, "the job has no validate()", "write validate(self, nets, batch) -> {'name': number}"
        )

    def repeats(self, count: int) -> Iterable[int]:
        """Turns 0 to count - 1 of a loop of ``validate`` whose turns do the same with memory.

        A trace may replace it to run the first two and the last alone. What the other turns would leave behind, the
        loop must allocate itself.
        """
        return range(count)

    def saved(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Any]:
        """What a checkpoint holds beside memfit's own state; by default the trained nets and the optimizers."""
        trained = {name: net for name, net in nets.items() if is_trained(net)}
        return {
            "nets": {name: net.state_dict() for name, net in trained.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
        }

    def checkpointable(self, nets: Nets) -> list[str] | None:
        """Paths (``net.block.0``) of the modules that may be recomputed; None: the repeated blocks of every net."""
        return None

    def also_checkpointable(self, nets: Nets) -> list[str]:
        """Paths of further modules that a plan may recompute, and that ``checkpoint=all`` leaves as they are."""
        return []

    def parallelize(self, nets: Nets, mesh: DeviceMesh) -> None:
        """Cuts the trained nets in place over the tensor-parallel ranks of ``mesh``, by
        ``torch.distributed.tensor.parallel.parallelize_module``; by default as transformers plans it for its nets, as
        attention of diffusers' kind has it (``memfit.engine.attention_plan``), and else as a forward shows
        (``memfit.engine.traced_plan``)."""

    def pipeline(self, nets: Nets) -> Sequence[str]:
        """Paths (``net.block.0``) of the modules between which the trained nets may be cut into stages (``pp``), in the
        order in which they run, once each. All trained parameters lie in them, and each takes what the one before gave
        as its first argument, one tensor. Without it, transformers' nets are cut as transformers plans it, and others
        as a forward shows (``memfit.engine.module_chain``)."""
        return []

    def context_buffers(self, nets: Nets, batch: Any) -> Sequence[tuple[Tensor, int]]:
        """Tensors of a batch, and buffers of nets, that have the whole sequence, each with the dimension of it: context
        parallelism (``cp``) cuts them over its ranks, and ``loss`` then gives the sum and the units of a rank's part.

        What one token needs of another must not be lost where they part: name targets that are shifted already, and
        positions, which a net would otherwise count from 0. Attention is passed between ranks where it is torch's
        ``scaled_dot_product_attention`` without a mask and dropout. Numbers that ``loss`` draws for each token are
        drawn alike on each rank: draw them in ``collate``.
        """
        return []

    def initialise(self, net: nn.Module, module: nn.Module) -> None:
        """Optional: gives a module's own parameters and buffers their first values, from torch's default generator.

        Where a job has it, engines that shard weights build its nets without values (torch's meta device), and call
        this with one module after the other whose own tensors are whole: no rank holds a whole net. All engines call
        it, so first values depend on neither engine nor ranks.

        Args:
            net: the net that the module is in, or is.
            module: one of its modules, of which children are given by themselves.
        """

    def autocast(self, device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
        """The autocast context of the job's precision on this device; does nothing in fp32."""
        import torch

        kind = torch.device(device).type
        if self.precision == "fp32":
            return (
                torch.autocast(kind, enabled=False)
                if torch.amp.is_autocast_available(kind)
                else contextlib.nullcontext()
            )
        return torch.autocast(kind, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float16)


def _check_parameters(job: type[Job], name: str, method: Callable[..., Any]) -> None:
    """Raises InputError if a job's method does not take what ``Job``'s method of that name takes."""
    given = list(inspect.signature(getattr(Job, name)).parameters)
    try:
        inspect.signature(method).bind(*given[1:])
    except TypeError as error:
        raise InputError(f"{job.__name__}.{name}()", str(error), f"write def {name}({', '.join(given)})") from None
    except ValueError:  # a method in C does not tell its parameters
        return


def _checked_ranges(job: Job) -> dict[str, tuple[float, float]]:
    """A job's ranges; each is of one of its settings that is a number, and has a least and a most."""
    for name, ends in job.ranges.items():
        seen, write = f"{type(job).__name__}.ranges[{name!r}] = {ends!r}", "write ranges = {'width': (8, 512)}, say"
        if not is_of_kind(getattr(job, name, None), float):
            raise InputError(seen, "no setting of the job with a number has that name", write)
        if not (isinstance(ends, list | tuple) and len(ends) == 2 and all(is_of_kind(end, float) for end in ends)):
            raise InputError(seen, "not the least and the most that it may be", write)
        if ends[0] > ends[1]:
            raise InputError(seen, "the least is more than the most", write)
    return {name: (least, most) for name, (least, most) in job.ranges.items()}


_METHODS = tuple(name for name, value in vars(Job).items() if callable(value) and not name.startswith("_"))


@functools.cache
def _attribute_kinds() -> dict[str, Any]:
    """The types of the class attributes that every job has, by name."""
    hints = typing.get_type_hints(Job)
    return {
        name: typing.get_args(kind)[0] if typing.get_origin(kind) is ClassVar else kind for name, kind in hints.items()
    }


def is_trained(net: nn.Module) -> bool:
    """Whether any parameter of a net requires a gradient."""
    return any(parameter.requires_grad for parameter in net.parameters())
