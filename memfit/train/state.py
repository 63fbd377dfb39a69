"""A run's whole state in one file: nets, optimizers, schedules, scaler, average, random numbers, position."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from memfit.apply.rig import Rig, is_trained
from memfit.errors import InputError, describe

FORMAT = 1


def save_state(rig: Rig, next_window: int, path: Path) -> None:
    """Writes the state beside its place, syncs it and renames it there: the one before stays whole until then."""
    state = {
        "memfit_checkpoint": FORMAT,
        "next_window": next_window,
        "saved": dict(rig.job.saved(rig.nets, rig.optimizers)),
        "schedules": {name: schedule.state_dict() for name, schedule in rig.schedules.items()},
        "scaler": rig.scaler.state_dict() if rig.scaler else None,
        "ema": {name: net.state_dict() for name, net in rig.ema.items()},
        "buffers": {name: dict(net.named_buffers()) for name, net in rig.nets.items() if is_trained(net)},
        "random": {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        },
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load_state(rig: Rig, path: Path) -> int:
    """Puts a state back; gives the next window.

    Raises:
        InputError: the file is torn, foreign, holds code, or is of another job.
    """
    again = "take another checkpoint, or start a new run in another --out"
    try:
        with zipfile.ZipFile(path) as file:
            spoiled = file.testzip()
        if spoiled is not None:
            raise zipfile.BadZipFile(f"the checksum of {spoiled} is another")
        state: dict[str, Any] = torch.load(path, map_location=rig.device, weights_only=True)
    except (
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        KeyError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise InputError(f"checkpoint {path}", f"it is torn or no checkpoint: {describe(error)}", again) from error
    if not isinstance(state, dict) or state.get("memfit_checkpoint") != FORMAT:
        raise InputError(f"checkpoint {path}", f"it was not written by this version of memfit (format {FORMAT})", again)
    try:
        for name, values in state["saved"]["nets"].items():
            rig.nets[name].load_state_dict(values)
        for name, values in state["saved"]["optimizers"].items():
            rig.optimizers[name].load_state_dict(values)
        for name, values in state["schedules"].items():
            rig.schedules[name].load_state_dict(values)
        for name, values in state["ema"].items():
            rig.ema[name].load_state_dict(values)
        for name, buffers in state["buffers"].items():
            for path_, buffer in rig.nets[name].named_buffers():
                buffer.copy_(buffers[path_])
    except (KeyError, RuntimeError, ValueError) as error:
        raise InputError(f"checkpoint {path}", f"it is of another job: {describe(error)}", again) from error
    if rig.scaler and state["scaler"]:
        rig.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"]["cpu"].cpu())
    if state["random"]["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([one.cpu() for one in state["random"]["cuda"]])
    return int(state["next_window"])


def save_final(rig: Rig, folder: Path) -> None:
    """One safetensors file for each trained net, of the average where there is one."""
    folder.mkdir(exist_ok=True)
    for name, net in rig.nets.items():
        if is_trained(net):
            save_file(_plain(rig.ema.get(name, net)), folder / f"{name}.safetensors")


def _plain(net: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; tensors that are shared come once, as safetensors asks."""
    seen: set[int] = set()
    found = {}
    for name, tensor in net.state_dict().items():
        if tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            found[name] = tensor.contiguous()
    return found
