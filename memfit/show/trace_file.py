"""A prediction with its trace in one file (``.npz``: numpy's columns and one JSON text; no pickles), and back."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from memfit.atomic_file import open_atomic
from memfit.device.hardware.catalogue import Device, TorchContext
from memfit.errors import InputError, unwritable, why_unreadable
from memfit.events import CutParameters, Trace
from memfit.footprint import Footprint, PeakLocation, PhaseFootprint, Request
from memfit.job import Shape
from memfit.planner.predict import NetSize, Prediction
from memfit.show.trace_check import check_fields, check_trace

VERSION = 3
_TABLES = ("names", "modules", "parts", "phases", "is_workspace_configured", "net_kind", "assumed")
_LEFT_OUT = ("tensor_parallel", "fixed_validation", "operator_card_call", "card_calls")
"""The first is of the footprint; the others only matter to a later trace, or to another card."""


def write_trace(path: Path, prediction: Prediction) -> None:
    """Writes a prediction.

    Raises:
        InputError: the file cannot be written.
    """
    trace = prediction.trace
    columns: dict[str, Any] = {
        field.name: getattr(trace, field.name) for field in fields(Trace) if field.name not in (*_TABLES, *_LEFT_OUT)
    }
    metadata = {
        "memfit_trace": VERSION,
        "job": prediction.job,
        "settings": prediction.settings,
        "shape": asdict(prediction.shape),
        "micro_batch": prediction.micro_batch,
        "unit": prediction.unit,
        "device": asdict(prediction.device),
        "nets": [asdict(net) for net in prediction.nets],
        "footprint": asdict(prediction.footprint),
        "checkpointing": dict(prediction.checkpointing),
        "seconds": prediction.seconds,
        **{name: getattr(trace, name) for name in _TABLES},
    }
    try:
        with open_atomic(path) as file:
            np.savez_compressed(file, told=np.array(json.dumps(metadata, default=str)), **columns)
    except OSError as error:
        raise unwritable(f"--trace {path}", error) from error


def read_trace(path: Path) -> Prediction:
    """Reads what ``write_trace`` wrote.

    Raises:
        InputError: no such file, or not one of these.
    """
    again = "make it again with memfit predict --trace F.npz"
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            metadata = json.loads(str(file["told"]))
            columns = {name: file[name] for name in file.files if name != "told"}
        if metadata.pop("memfit_trace") != VERSION:
            raise InputError(f"trace {path}", "it is of another version", again)
        prediction = _prediction(metadata, columns)
        check_trace(prediction.trace)
        check_fields(prediction)
        return prediction
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            f"trace {path}",
            f"cannot be read: {why_unreadable(error)}",
            "write the path of a file that memfit predict --trace wrote",
        ) from error
    except Exception as error:  # zipfile's, zlib's, tokenize's, numpy's: a file of anybody's
        raise InputError(f"trace {path}", f"not a trace of memfit ({type(error).__name__})", again) from error


def _prediction(metadata: dict[str, Any], columns: dict[str, Any]) -> Prediction:
    phases = tuple((name, start, end) for name, start, end in metadata.pop("phases"))
    columns |= {name: tuple(metadata.pop(name)) for name in ("names", "modules", "parts", "assumed")}
    cut = metadata["footprint"].get("tensor_parallel")
    cut = cut and CutParameters(parameters=int(cut["parameters"]), cut=int(cut["cut"]))
    metadata["footprint"]["tensor_parallel"] = cut
    trace = Trace(
        **columns, phases=phases, net_kind=metadata.pop("net_kind"), tensor_parallel=cut,
        is_workspace_configured=bool(metadata.pop("is_workspace_configured", False)),
    )  # fmt: skip
    return Prediction(
        **metadata
        | {
            "trace": trace,
            "shape": Shape(**metadata["shape"]),
            "device": _device(metadata["device"]),
            "nets": tuple(NetSize(**net) for net in metadata["nets"]),
            "footprint": _footprint(metadata["footprint"]),
        }
    )


def _device(metadata: dict[str, Any]) -> Device:
    capability = metadata["compute_capability"]
    contexts = tuple(TorchContext(**each) for each in metadata["context_by_torch"])
    return Device(**metadata | {"compute_capability": capability and tuple(capability), "context_by_torch": contexts})


def _footprint(metadata: dict[str, Any]) -> Footprint:
    phases = {
        name: PhaseFootprint(
            **phase | {"at": PeakLocation(**phase["at"]), "largest_request": Request(**phase["largest_request"])}
        )
        for name, phase in metadata["phases"].items()
    }
    failed = metadata["failed_request"]
    return Footprint(
        **metadata
        | {"phases": phases, "failed_request": failed and Request(**failed), "assumed": tuple(metadata["assumed"])}
    )
