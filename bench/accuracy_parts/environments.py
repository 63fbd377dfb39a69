"""Folders with the versions of timm, Transformers and torchvision that measured runs used, apart from memfit's own.

Each is filled once by ``pip install --no-deps --target`` and put in front of ``sys.path`` in a worker process. torch
stays the one that memfit runs under: only the libraries' own code differs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

from memfit.errors import InputError

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "installed": (),
    "timm-1.0.9": ("timm==1.0.9",),
    "torchao-0.18": ("timm==1.0.9", "torchao==0.18.0"),
    "deepspeed-0.15": ("timm==1.0.9", "deepspeed==0.15.1"),
    "litgpt-0.5": ("litgpt==0.5.3",),
    "litgpt-0.5-bitsandbytes": ("litgpt==0.5.3", "lightning==2.4.0", "bitsandbytes==0.42.0"),
    "timm-0.6.13": ("timm==0.6.13", "torchvision==0.21.0"),
    "torchvision-0.21": ("torchvision==0.21.0",),
    "transformers-4.51.3": ("transformers==4.51.3", "tokenizers>=0.21,<0.22", "huggingface_hub>=0.30,<1.0"),
}
"""Environment -> what pip installs for it, without what that depends on. ``installed``: the packages beside memfit."""


def environments_folder() -> Path:
    """Where the environments are; MEMFIT_ENVIRONMENTS names another folder."""
    return Path(os.environ.get("MEMFIT_ENVIRONMENTS", Path(__file__).resolve().parents[1] / ".environments"))


def install(name: str) -> Path:
    """Fills an environment's folder where it is not filled yet, and returns it.

    Raises:
        InputError: no such environment, or pip fails.
    """
    if name not in ENVIRONMENTS:
        raise InputError(f"environment {name!r}", f"not one of {', '.join(ENVIRONMENTS)}", "write one of them")
    folder = environments_folder() / name
    done = folder / "complete"
    wanted = ENVIRONMENTS[name]
    if not wanted or done.exists():
        return folder
    for package in wanted:  # one by one: pip resolves the requirements of what it installs together
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet", "--upgrade"]
        result = subprocess.run([*command, "--target", str(folder), package], capture_output=True, text=True)
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise InputError(
                package, reason, f"install it yourself: pip install --no-deps --target {folder} '{package}'"
            )
    done.touch()
    return folder


def enter(name: str) -> None:
    """Puts an environment's packages in front of this process's own. Call it before any of them is imported."""
    folder = str(environments_folder() / name)
    if ENVIRONMENTS[name] and folder not in sys.path:
        sys.path.insert(0, folder)
    if any(package.startswith("torchvision") for package in ENVIRONMENTS[name]):
        _declare_torchvision_operators()


def _declare_torchvision_operators() -> None:
    """torchvision's compiled operators belong to another torch; its Python code asks for this one on import."""
    import torch

    warnings.filterwarnings("ignore", "Failed to load image Python extension")
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


_libraries: list[object] = []
"""Operators are declared for as long as their library lives."""
