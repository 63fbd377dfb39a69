"""Training scripts of nanoGPT, Accelerate, diffusers, F5-TTS and LatentSync, traced as they are, beside built-in jobs
of the same nets.

python -m bench.upstream_scripts --scripts FOLDER [--json F]

FOLDER holds the projects ``nanogpt``, ``accelerate``, ``diffusers``, ``f5_tts`` and ``latentsync``; they are copied,
and the copies get data made up on the spot (bench/upstream_data.py). Their packages (datasets, evaluate, timm,
hydra-core, ema-pytorch, x-transformers, decord ...) must be installed; those without a build for a CPU have stand-ins
(bench/upstream_stand_ins.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.result_file import ROOT, add_json_option, target, write_result
from bench.upstream_data import (
    random_clips,
    random_pets,
    random_pictures,
    random_sentences,
    random_tokens,
    random_videos,
)
from bench.upstream_stand_ins import STAND_INS

CARD = "a100-80gb"
STUBS = ("eval", "lpips", "kornia", "insightface")
F5_DATA = ("datasets.name=Clips", "datasets.batch_size_per_gpu=4000", "datasets.num_workers=2")
F5_LOGS = ("ckpts.log_samples=False", "ckpts.logger=null", "ckpts.last_per_updates=3")


@dataclass(frozen=True, kw_only=True)
class Project:
    """A script, and the built-in job of the same step.

    Attributes:
        folder: the project's folder.
        prepare: makes its data, in its folder.
        command: what its author types.
        stand_ins: whether it imports a package that has a stand-in.
        stubs: packages that the step's memory does not depend on.
        job: words for ``memfit predict``; none where there is no such job.
    """

    name: str
    folder: str
    prepare: Callable[[Path], None]
    command: Sequence[str]
    paths: Sequence[str] = (".",)
    stand_ins: bool = True
    stubs: Sequence[str] = ()
    job: Sequence[str] = ()


PROJECTS = (
    Project(
        name="nanogpt", folder="nanogpt", prepare=random_tokens,
        command=(
            "python", "train.py", "config/train_gpt2.py", "--dataset=made_up", "--batch_size=4",
            "--gradient_accumulation_steps=2", "--eval_interval=2", "--eval_iters=2", "--max_iters=3",
            "--wandb_log=False",
        ),
    ),
    Project(
        name="accelerate nlp_example", folder="accelerate", prepare=random_sentences, stand_ins=False,
        command=("accelerate", "launch", "examples/nlp_example.py"),
    ),
    Project(
        name="accelerate cv_example", folder="accelerate", prepare=random_pets,
        command=("accelerate", "launch", "examples/cv_example.py", "--data_dir", "images", "--mixed_precision=fp16"),
    ),
    Project(
        name="diffusers train_unconditional", folder="diffusers", prepare=random_pictures,
        command=(
            "accelerate", "launch", "../stand_ins/older_libraries.py",
            "examples/unconditional_image_generation/train_unconditional.py", "--train_data_dir=pictures",
            "--resolution=64", "--train_batch_size=16", "--num_epochs=1", "--use_ema", "--mixed_precision=fp16",
            "--logger=tensorboard",
        ),
    ),
    Project(
        name="f5_tts", folder="f5_tts", prepare=random_clips, paths=("src",),
        command=("python", "src/f5_tts/train/train.py", "--config-name", "F5TTS_v1_Base.yaml", *F5_DATA, *F5_LOGS),
        job=("f5_tts/base", "--shape", "4x938", "--precision", "fp32"),
    ),
    Project(
        name="latentsync", folder="latentsync", prepare=random_videos, stubs=STUBS,
        command=(
            "torchrun", "--nproc_per_node=1", "../stand_ins/older_libraries.py", "scripts/train_unet.py",
            "--unet_config_path", "configs/unet/made_up.yaml",
        ),
        job=("latentsync/stage1", "--micro-batch", "1"),
    ),
)  # fmt: skip


def measure(project: Project, scripts: Path, scratch: Path) -> dict[str, Any]:
    """The peaks of the script, and of the job where there is one."""
    folder = scratch / project.name.replace(" ", "_")
    shutil.copytree(scripts / project.folder, folder, copy_function=shutil.copyfile)
    for made in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        made.chmod(0o755)
    project.prepare(folder)
    stubs = [word for stub in project.stubs for word in ("--stub", stub)]
    command = ["trace", "--device", CARD, "--steps", "3", *stubs, "--json", str(scratch / "trace.json"), "--"]
    paths = [str(scratch / "stand_ins")] * project.stand_ins
    paths += [*(str((folder / path).resolve()) for path in project.paths), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    _memfit([*command, *project.command], folder, environment)
    answer = json.loads((scratch / "trace.json").read_text())
    if answer["windows"] < 2:
        raise SystemExit(f"{project.name}: {answer['ended']}")
    row = {
        "script": project.name, "command": " ".join(project.command), "windows": answer["windows"],
        "processor_seconds": answer["processor_seconds"], "bytes": _allocated(answer),
    }  # fmt: skip
    if project.job:
        printed = _memfit(["predict", *project.job, "--device", CARD, "--json"], ROOT, dict(os.environ))
        row |= {"job": " ".join(project.job), "job_bytes": _allocated(json.loads(printed))}
    return row


def _memfit(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *words], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def _allocated(answer: Mapping[str, Any]) -> dict[str, int]:
    return {name: phase["allocated_bytes"] for name, phase in answer["phases"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", type=Path, required=True, help="the folder of the projects")
    add_json_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        for name, text in STAND_INS.items():
            (scratch / "stand_ins" / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / "stand_ins" / name).write_text(text.lstrip("\n"))
        rows = [measure(project, arguments.scripts, scratch) for project in PROJECTS]
    for row in rows:
        print(row)
    packages = ("transformers", "diffusers", "accelerate", "timm", "ema-pytorch", "x-transformers", "einops")
    write_result(target(arguments.json), {"card": CARD, "scripts": rows}, packages=packages)


if __name__ == "__main__":
    main()
