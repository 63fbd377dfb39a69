"""A prediction with its trace in one file (``.npz``: numpy's columns and one JSON text; no pickles), and back."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from memfit.atomic_file import open_atomic
from memfit.device.hardware.catalogue import Device
from memfit.errors import InputError
from memfit.events import Trace
from memfit.footprint import Footprint, PeakLocation, PhaseFootprint, Request
from memfit.job import Shape
from memfit.planner.predict import NetSize, Prediction
from memfit.show.trace_check import check_fields, check_trace

VERSION = 2
_TABLES = ("names", "modules", "parts", "phases", "net_kind", "assumed")


def write_trace(path: Path, prediction: Prediction) -> None:
    """Writes a prediction.

    Raises:
        InputError: the file cannot be written.
    """
    trace = prediction.trace
    columns: dict[str, Any] = {
        field.name: getattr(trace, field.name) for field in fields(Trace) if field.name not in _TABLES
    }
    told = {
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
            np.savez_compressed(file, told=np.array(json.dumps(told, default=str)), **columns)
    except OSError as error:
        raise InputError(
            f"--trace {path}", f"cannot be written: {error.strerror}", "write a path in a folder that is there"
        ) from error


def read_trace(path: Path) -> Prediction:
    """Reads what ``write_trace`` wrote.

    Raises:
        InputError: no such file, or not one of these.
    """
    again = "make it again with memfit predict --trace F.npz"
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            told = json.loads(str(file["told"]))
            columns = {name: file[name] for name in file.files if name != "told"}
        if told.pop("memfit_trace") != VERSION:
            raise InputError(f"trace {path}", "it is of another version", again)
        found = _prediction(told, columns)
        check_trace(found.trace)
        check_fields(found)
        return found
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            f"trace {path}",
            f"cannot be read: {error.strerror or error}",
            "write the path of a file that memfit predict --trace wrote",
        ) from error
    except Exception as error:  # zipfile's, zlib's, tokenize's, numpy's: a file of anybody's
        raise InputError(f"trace {path}", f"not a trace of memfit ({type(error).__name__})", again) from error


def _prediction(told: dict[str, Any], columns: dict[str, Any]) -> Prediction:
    phases = tuple((name, start, end) for name, start, end in told.pop("phases"))
    columns |= {name: tuple(told.pop(name)) for name in ("names", "modules", "parts", "assumed")}
    trace = Trace(**columns, phases=phases, net_kind=told.pop("net_kind"))
    capability = told["device"]["compute_capability"]
    told["device"]["compute_capability"] = capability and tuple(capability)
    return Prediction(
        **told
        | {
            "trace": trace,
            "shape": Shape(**told["shape"]),
            "device": Device(**told["device"]),
            "nets": tuple(NetSize(**net) for net in told["nets"]),
            "footprint": _footprint(told["footprint"]),
        }
    )


def _footprint(told: dict[str, Any]) -> Footprint:
    phases = {
        name: PhaseFootprint(
            **phase | {"at": PeakLocation(**phase["at"]), "largest_request": Request(**phase["largest_request"])}
        )
        for name, phase in told["phases"].items()
    }
    failed = told["failed_request"]
    return Footprint(
        **told | {"phases": phases, "failed_request": failed and Request(**failed), "assumed": tuple(told["assumed"])}
    )
