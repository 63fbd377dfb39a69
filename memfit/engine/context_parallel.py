"""Context parallelism: the sequences of a micro-batch divided over the ``cp`` ranks of a mesh.

torch's ``context_parallel`` cuts the tensors that the job names (``Job.context_buffers``) and passes keys and values of
attention around between the ranks. Each rank computes the losses of its own part, whose sums and units are added over
the ranks, as are gradients; parameters are sharded over the ranks as over those of ``dp_shard``. Validation and
averages see whole sequences.

Left out: attention with a mask, with dropout or with a window of its own, for which torch has no ring, and convolutions
of one dimension along the sequence. Not seen are other operators through which tokens depend on each other, as a
recurrence: ``memfit verify`` shows that the steps are not those of one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from memfit.engine.collectives import is_memory_failure
from memfit.engine.lost_rank import is_lost_rank
from memfit.errors import InputError, message_of
from memfit.job import Job, Nets
from memfit.nested_tensors import map_tensors
from memfit.torch_compat.context_parallel import check_context_parallel, divided_sequences, in_rings

CONTEXT = "cp"
"""The dimension of a mesh of ranks that hold parts of one sequence."""
RINGS = "memfit_rings"
"""The name under which transformers knows attention without a mask, which torch's rings carry."""
_ALONE = "leave cp out of the mesh"


def names_sequences(job: Job) -> bool:
    """Whether a job says which tensors have a sequence."""
    return type(job).context_buffers is not Job.context_buffers


def check_divides_sequences(job: Job) -> None:
    """Raises InputError where a job does not say which tensors have the sequence, or torch cannot divide it."""
    if not names_sequences(job):
        why = "the job does not say which tensors of a batch have the sequence"
        write = "write context_buffers(self, nets, batch) -> [(tensor, dimension), ...], or leave cp out of the mesh"
        raise InputError(f"job {type(job).__name__} on cp", why, write)
    check_context_parallel()


@contextmanager
def divide_sequences(
    job: Job, nets: Nets, batches: Sequence[Any], mesh: DeviceMesh, over_stages: Callable[[int], int] = int
) -> Iterator[Any]:
    """Context of the forwards and backwards of micro-batches of one shape; gives the batches with this rank's part of
    each sequence.

    Args:
        batches: as the job's ``collate`` gave them; stay as they are.
        mesh: of one dimension.
        over_stages: sums a number over the stages of a pipeline.

    Raises:
        InputError: what the job names cannot be cut, or attention needs what torch's rings do not have.
    """
    buffers, dimensions = _named(job, nets, batches, mesh.size())
    of_nets = {id(buffer) for net in nets.values() for buffer in net.buffers()}
    copies = {
        id(buffer): buffer.clone(memory_format=torch.contiguous_format)
        for buffer in buffers if id(buffer) not in of_nets
    }  # fmt: skip
    in_batch: set[int] = set()

    def replaced(tensor: Tensor) -> Tensor:
        in_batch.add(id(tensor))
        return copies.get(id(tensor), tensor)

    given = map_tensors(list(batches), replaced)
    if copies.keys() - in_batch:
        raise InputError(_seen(job), "it names a tensor that is neither in the batch nor a buffer of a net", _WRITE)
    cut = [copies.get(id(buffer), buffer) for buffer in buffers]
    kept = [buffer for buffer in buffers if id(buffer) in of_nets]
    with ExitStack() as stack:
        for model in (model for net in nets.values() for model in _models_of_transformers(net)):
            stack.enter_context(_rings_of_transformers(model))
        stack.enter_context(divided_sequences(mesh, cut, dimensions, kept, balanced=job.causal_attention))
        stack.enter_context(_mistakes(job))
        if not _seen_attention.issuperset(nets.values()):
            lengths = {tensor.shape[dimension] for tensor, dimension in zip(cut, dimensions, strict=True)}
            stack.enter_context(_AttentionCheck(job, nets, lengths, over_stages))
        del buffers  # whole sequences, which nothing needs any more
        yield given


class _AttentionCheck(TorchFunctionMode):
    """In the first forward of nets: attention that torch does not divide, and a convolution along the sequence, would
    see a rank's own part alone.

    Args:
        lengths: of a rank's part of a sequence, in tokens.
        over_stages: sums a number over the stages of a pipeline, of which one may have no attention.
    """

    def __init__(self, job: Job, nets: Nets, lengths: Set[int], over_stages: Callable[[int], int]) -> None:
        super().__init__()
        self._where, self._nets, self._calls = f"job {type(job).__name__} on cp", nets, 0
        self._lengths, self._over_stages = lengths, over_stages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATTENTION:
            if not any(isinstance(value, DTensor) for value in args):
                why = "an attention is called by a name that was imported, in whose place torch puts no ring"
                raise InputError(self._where, why, "write torch.nn.functional.scaled_dot_product_attention(q, k, v)")
            given = dict(zip(_ARGUMENTS, args, strict=False)) | dict(kwargs or {})
            for name in ("attn_mask", "dropout_p"):
                if isinstance(given.get(name), Tensor) or given.get(name):
                    raise InputError(self._where, f"an attention has {name}, and torch's rings have none", _WITHOUT)
            self._calls += 1
        elif func is torch.conv1d and self._is_along_sequence(*args[:2], **dict(kwargs or {})):
            why = "a convolution along the sequence would not see the tokens of the other ranks' parts"
            raise InputError(self._where, why, _ALONE)
        return func(*args, **(kwargs or {}))

    def _is_along_sequence(self, input: Tensor, weight: Tensor, **_: Any) -> bool:
        return weight.shape[-1] > 1 and input.shape[-1] in self._lengths

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        if kind is None and self._over_stages(self._calls) == 0:
            why = "no net called torch's scaled_dot_product_attention, so no token saw those of other ranks"
            raise InputError(self._where, why, f"compute attention by it, or {_ALONE}")
        if kind is None:
            _seen_attention.update(self._nets.values())


_ATTENTION = nn.functional.scaled_dot_product_attention
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p")
_WITHOUT = f"call attention without, or {_ALONE}"
_RINGS_TAKE = (
    "call attention without a mask, in bf16, or in fp32 with parts of a sequence that are multiples of 32 tokens "
    f"(what torch's memory-efficient kernel pads to), or {_ALONE}"
)
_seen_attention: WeakSet[nn.Module] = WeakSet()
"""Nets whose attention was seen to be divided."""


_WRITE = "write context_buffers(self, nets, batch) -> [(tensor, dimension), ...]"


def _seen(job: Job) -> str:
    return f"{type(job).__name__}.context_buffers()"


def _named(job: Job, nets: Nets, batches: Sequence[Any], ranks: int) -> tuple[list[Tensor], list[int]]:
    """What the job names of batches of one shape: tensors, each once, and the dimension of the sequence in each.

    Raises:
        InputError: as of ``_named_of_batch``.
    """
    pairs = {id(pair[0]): pair for batch in batches for pair in _named_of_batch(job, nets, batch, ranks)}
    return [tensor for tensor, _ in pairs.values()], [dimension for _, dimension in pairs.values()]


def _named_of_batch(job: Job, nets: Nets, batch: Any, ranks: int) -> Sequence[tuple[Tensor, int]]:
    """What the job names.

    Raises:
        InputError: it is no list of tensors and dimensions, or the sequences cannot be cut into so many parts.
    """
    given = job.context_buffers(nets, batch)
    if not isinstance(given, Sequence) or not given:
        raise InputError(_seen(job), f"gave {given!r}, not tensors with dimensions"[:200], _WRITE)
    for pair in given:
        fits = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Tensor) and type(pair[1]) is int
        if not fits or not 0 <= pair[1] < pair[0].dim():
            raise InputError(_seen(job), "gave what is not a tensor and one of its dimensions, from 0", _WRITE)
    lengths = sorted({tensor.shape[dimension] for tensor, dimension in given})
    if len(lengths) > 1:
        why = f"its sequences have several lengths: {', '.join(map(str, lengths))}"
        raise InputError(_seen(job), why, "name tensors of one length, as tokens, targets and positions")
    parts = 2 * ranks if job.causal_attention else ranks
    if lengths[0] % parts:
        why = f"a sequence of {lengths[0]} does not divide by {parts}"
        raise InputError(f"{_seen(job)} on cp={ranks}", why, f"pad sequences to a multiple of {parts} in collate()")
    return given


@contextmanager
def _mistakes(job: Job) -> Iterator[None]:
    """Raises InputError where attention needs what torch's rings do not have."""
    try:
        yield
    except RuntimeError as error:
        if "Load balancing requires `is_causal=True`" in message_of(error):
            why = "its causal_attention is set, and an attention is not causal"
            raise InputError(f"job {type(job).__name__} on cp", why, "write causal_attention = False") from error
        if not is_memory_failure(error) and not is_lost_rank(error) and in_rings(error):
            why = f"torch's ring fails on an attention ({message_of(error)[:80]})"
            raise InputError(f"job {type(job).__name__} on cp", why, _RINGS_TAKE) from error
        raise


def _models_of_transformers(net: nn.Module) -> Iterator[nn.Module]:
    """A net that is a model of transformers, else the outermost ones in it, as in a wrapper of PEFT."""
    if hasattr(type(net), "set_attn_implementation"):
        yield net
        return
    for child in net.children():
        yield from _models_of_transformers(child)


@contextmanager
def _rings_of_transformers(net: nn.Module) -> Iterator[None]:
    """A model of transformers without the masks that it makes of positions, which a divided sequence would need whole.

    Raises:
        InputError: the net is given a mask or no positions, or its attention has a window of its own.
    """
    config: Any = getattr(net, "config", None)
    change: Any = getattr(net, "set_attn_implementation")  # noqa: B009
    if not hasattr(config, "_attn_implementation"):
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(RINGS, _attention_without_mask)
    before = config._attn_implementation
    watch = net.register_forward_pre_hook(_check_call, with_kwargs=True)
    change(RINGS)
    try:
        yield
    finally:
        change(before)
        watch.remove()


def _check_call(net: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises InputError where a net of transformers is given a mask, or counts positions by itself."""
    kind = type(net).__bases__[-1] if isinstance(net, FSDPModule) else type(net)  # FSDP2 makes a class of its own
    where = f"net {kind.__name__} on cp"
    parameters = inspect.signature(net.forward).parameters
    given = dict(zip(parameters, args, strict=False)) | dict(kwargs)
    routers = given.get("output_router_logits")
    if getattr(net.config, "output_router_logits", False) if routers is None else routers:
        why = "the balancing loss of its routers (output_router_logits) mixes tokens, of which a rank has a part"
        raise InputError(where, why, f"leave output_router_logits out, or {_ALONE}")
    if given.get("attention_mask") is not None:
        why = "it is given an attention_mask, and torch's rings have no masks"
        raise InputError(where, why, "pad at the end and leave the padding out of the loss, without a mask")
    if "position_ids" in parameters:
        if given.get("position_ids") is None:
            why = "it is given no position_ids, and would count the tokens of every rank's part from 0"
            raise InputError(where, why, "give it position_ids, and name them in context_buffers()")
    elif hasattr(getattr(net, "config", None), "max_position_embeddings"):
        why = "it takes no position_ids, and would count the tokens of every rank's part from 0"
        raise InputError(where, why, _ALONE)


def _attention_without_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention, (batch, heads, sequence, features), by torch's ``scaled_dot_product_attention``."""
    for name in ("sliding_window", "softcap", "position_bias", "s_aux"):
        if more.get(name) is not None:
            seen = f"module {type(module).__name__} on cp"
            raise InputError(seen, f"its attention has {name}, and torch's rings have none", _ALONE)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    given = nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=causal, scale=scaling
    )
    return given.transpose(1, 2).contiguous(), None
