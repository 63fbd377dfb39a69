"""Trace: one training step as a list of memory events and operators. Plain data that can be saved and read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

CATEGORIES = (
    "parameters", "gradients", "optimizer", "activations", "temporaries", "inputs", "buffers", "communication", "ema",
    "frozen", "workspace",
)  # fmt: skip
"""What a storage holds. activations: made in a forward and alive at its end; temporaries: the rest of a step's."""

ALLOCATE, FREE, EMPTY_CACHE = 1, -1, 0
"""Kinds of event. EMPTY_CACHE: the allocator gives its free segments back (``torch.cuda.empty_cache``)."""
FAILED = "failed"
"""The phase of an attempt that ran out of memory, and was made again with less: its events are no need of the run."""
TO_HOST, TO_DEVICE = "to_host", "to_device"
"""Names of the operators that copy over the link between a card and its host."""
ON_HOST = "on_host "
"""Before the name of an operator that writes the host's tensors while a card is traced."""
OVER = " over "
"""Between a collective's name and the dimension of the mesh whose ranks it joins, in the name of its operator."""


@dataclass(frozen=True, kw_only=True)
class CutParameters:
    """Parameters of the nets of a tensor-parallel rank, in elements of one device.

    Attributes:
        parameters: all of them; of a pipeline those of the rank's stages.
        cut: those of which each rank of ``tp`` has a part. The others are whole on every one.
    """

    parameters: int
    cut: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Memory events in the order they happened, with what each storage holds and who asked for it.

    Columns of events (length E), of storages (length S; a storage is allocated once and freed at most once), of
    operators (length O), and tables of names.
    """

    kind: np.ndarray
    """int8 (E,): ALLOCATE, FREE or EMPTY_CACHE."""
    storage: np.ndarray
    """int32 (E,): the storage allocated or freed; -1 for EMPTY_CACHE."""
    operator: np.ndarray
    """int32 (E,): the operator during which it happened."""
    nbytes: np.ndarray
    """int64 (S,): bytes asked for."""
    category: np.ndarray
    """uint8 (S,): index into CATEGORIES."""
    stream: np.ndarray
    """uint8 (S,): the stream whose pool it comes from; 0 is the default one."""
    made_by: np.ndarray
    """int32 (S,): the operator that allocated the storage."""
    operator_name: np.ndarray
    """int32 (O,): index into names."""
    operator_module: np.ndarray
    """int32 (O,): index into modules."""
    operator_part: np.ndarray
    """int32 (O,): index into parts."""
    operator_flops: np.ndarray
    """int64 (O,): floating point operations; a multiply-add counts two."""
    operator_bytes: np.ndarray
    """int64 (O,): bytes of the tensors read and written."""
    operator_card_call: np.ndarray | None = None
    """int32 (O,): index into card_calls; None where the trace is for one card alone."""
    names: tuple[str, ...]
    modules: tuple[str, ...]
    parts: tuple[str, ...]
    """Parts of a window as ``forward``, ``backward``, ``clip``, ``optimizer``, ``zero_grad`` …"""
    phases: tuple[tuple[str, int, int], ...]
    """(name, first event, past the last event), in order: ``setup``, ``train`` a window, ``validate``, ``save``."""
    card_calls: tuple[str, ...] = ()
    """What calls take scratch that depends on the card, as of ``memfit.trace.card_calls``; an empty one: none."""
    is_workspace_configured: bool = False
    """Whether CUBLAS_WORKSPACE_CONFIG gave cuBLAS's workspaces their bytes, which are then the same on every card."""
    net_kind: str = ""
    """Family and precision of the nets, see ``memfit.trace.net_kind``; empty where it is not known."""
    assumed: tuple[str, ...] = ()
    """Sizes that depend on data, which a trace does not have: where each was asked for and what was taken."""
    tensor_parallel: CutParameters | None = None
    """What ``tp`` cuts; None without it."""
    fixed_validation: str = ""
    """Of a validation whose batch the job made without reading the micro-batch's shape: what the windows before it have
    changed in the job's objects, digested. Empty: it read the shape, or they hold what no digest tells."""
