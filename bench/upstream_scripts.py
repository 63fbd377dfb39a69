"""The training scripts of nanoGPT, F5-TTS and LatentSync, traced as they are, beside built-in jobs of the same nets.

python -m bench.upstream_scripts --scripts FOLDER [--json F]

FOLDER holds the projects ``nanogpt``, ``f5_tts`` and ``latentsync``; it is copied, and the copies get data made up on
the spot. Their packages (datasets, hydra-core, ema-pytorch, x-transformers, decord ...) must be installed; those that
have no build for a CPU have stand-ins (bench/upstream_stand_ins.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.result_file import ROOT, add_json_option, target, write_result
from bench.upstream_stand_ins import STAND_INS

CARD = "a100-80gb"
CLIPS, SECONDS, VIDEOS = 48, 10.0, 8
WHISPER_TINY = {
    "n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": 384, "n_audio_head": 6, "n_audio_layer": 4, "n_vocab": 51865,
    "n_text_ctx": 448, "n_text_state": 384, "n_text_head": 6, "n_text_layer": 4,
}  # fmt: skip
SD_VAE = {
    "_class_name": "AutoencoderKL", "block_out_channels": [128, 256, 512, 512], "in_channels": 3, "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "latent_channels": 4,
    "layers_per_block": 2, "norm_num_groups": 32, "sample_size": 256,
}  # fmt: skip
STUBS = ("eval", "lpips", "kornia", "insightface")
F5_DATA = ("datasets.name=Clips", "datasets.batch_size_per_gpu=4000", "datasets.num_workers=2")
F5_LOGS = ("ckpts.log_samples=False", "ckpts.logger=null", "ckpts.last_per_updates=3")


@dataclass(frozen=True, kw_only=True)
class Project:
    """A script, and the built-in job of the same step.

    Attributes:
        prepare: makes its data, in its folder.
        command: what its author types.
        stubs: packages that the step's memory does not depend on.
        job: words for ``memfit predict``; none where there is no such job.
    """

    name: str
    prepare: Callable[[Path], None]
    command: Sequence[str]
    paths: Sequence[str] = (".",)
    stubs: Sequence[str] = ()
    job: Sequence[str] = ()


def random_tokens(folder: Path) -> None:
    """nanoGPT's two files of token numbers."""
    (folder / "data" / "made_up").mkdir(parents=True)
    for name in ("train", "val"):
        tokens = array("H", (random.randrange(50257) for _ in range(200_000)))
        (folder / "data" / "made_up" / f"{name}.bin").write_bytes(tokens.tobytes())


def random_clips(folder: Path) -> None:
    """F5-TTS's data set: clips of noise with a text, their lengths and a vocabulary of 2545."""
    import numpy
    import soundfile
    from datasets import Dataset

    home = folder / "data" / "Clips_pinyin"
    (home / "wavs").mkdir(parents=True)
    rows = []
    for number in range(CLIPS):
        path = home / "wavs" / f"{number}.wav"
        soundfile.write(path, numpy.random.randn(int(24000 * SECONDS)).astype("float32") / 10, 24000)
        text = list("a clip of made up sound, as long as the others and with these words")
        rows.append({"audio_path": str(path), "text": text, "duration": SECONDS})
    Dataset.from_list(rows).save_to_disk(home / "raw")
    (home / "duration.json").write_text(json.dumps({"duration": [SECONDS] * CLIPS}))
    words = [" ", *(chr(33 + k) if k < 90 else f"t{k}" for k in range(2544))]
    (home / "vocab.txt").write_text("".join(f"{word}\n" for word in words))


def random_videos(folder: Path) -> None:
    """LatentSync's videos, Whisper with random weights, the VAE's configuration, and its own with these paths."""
    import cv2
    import numpy
    import torch
    from omegaconf import OmegaConf

    (folder / "videos").mkdir()
    for number in range(VIDEOS):
        writer = cv2.VideoWriter(
            str(folder / "videos" / f"{number}.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 25, (256, 256)
        )
        for _ in range(80):
            writer.write((numpy.random.rand(256, 256, 3) * 255).astype("uint8"))
        writer.release()
    white = numpy.full((256, 256, 3), 255, "uint8")
    cv2.imwrite(str(folder / "latentsync" / "utils" / "mask.png"), white)
    assets = folder / "latentsync" / "whisper" / "whisper" / "assets"
    assets.mkdir(exist_ok=True)
    numpy.savez(assets / "mel_filters.npz", mel_80=numpy.random.rand(80, 201).astype("float32"))
    (folder / "stabilityai" / "sd-vae-ft-mse").mkdir(parents=True)
    (folder / "stabilityai" / "sd-vae-ft-mse" / "config.json").write_text(json.dumps(SD_VAE))
    sys.path[:0] = [str(folder), str(folder.parent / "stand_ins")]
    model: Any = __import__("latentsync.whisper.whisper.model", fromlist=["Whisper"])
    whisper = model.Whisper(model.ModelDimensions(**WHISPER_TINY))
    (folder / "checkpoints" / "whisper").mkdir(parents=True)
    weights = {"dims": WHISPER_TINY, "model_state_dict": whisper.state_dict()}
    torch.save(weights, folder / "checkpoints" / "whisper" / "tiny.pt")
    config = OmegaConf.load(folder / "configs" / "unet" / "stage1.yaml")
    config.data.train_fileslist, config.data.train_data_dir = "", "videos"
    config.data.audio_embeds_cache_dir, config.data.audio_mel_cache_dir = "", "cache/mel"
    config.ckpt.resume_ckpt_path = ""
    OmegaConf.save(config, folder / "configs" / "unet" / "made_up.yaml")


PROJECTS = (
    Project(
        name="nanogpt", prepare=random_tokens,
        command=(
            "python", "train.py", "config/train_gpt2.py", "--dataset=made_up", "--batch_size=4",
            "--gradient_accumulation_steps=2", "--eval_interval=2", "--eval_iters=2", "--max_iters=3",
            "--wandb_log=False",
        ),
    ),
    Project(
        name="f5_tts", prepare=random_clips, paths=("src",),
        command=("python", "src/f5_tts/train/train.py", "--config-name", "F5TTS_v1_Base.yaml", *F5_DATA, *F5_LOGS),
        job=("f5_tts/base", "--shape", "4x938", "--precision", "fp32"),
    ),
    Project(
        name="latentsync", prepare=random_videos, stubs=STUBS,
        command=(
            "torchrun", "--nproc_per_node=1", "../stand_ins/older_libraries.py", "scripts/train_unet.py",
            "--unet_config_path", "configs/unet/made_up.yaml",
        ),
        job=("latentsync/stage1", "--micro-batch", "1"),
    ),
)  # fmt: skip


def measure(project: Project, scripts: Path, scratch: Path) -> dict[str, Any]:
    """The peaks of the script, and of the job where there is one."""
    folder = scratch / project.name
    shutil.copytree(scripts / project.name, folder, copy_function=shutil.copyfile)
    for made in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        made.chmod(0o755)
    project.prepare(folder)
    stubs = [word for stub in project.stubs for word in ("--stub", stub)]
    command = ["trace", "--device", CARD, "--steps", "3", *stubs, "--json", str(scratch / "trace.json"), "--"]
    paths = [str(scratch / "stand_ins"), *(str((folder / path).resolve()) for path in project.paths), str(ROOT)]
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
    packages = ("transformers", "diffusers", "accelerate", "ema-pytorch", "x-transformers", "einops")
    write_result(target(arguments.json), {"card": CARD, "scripts": rows}, packages=packages)


if __name__ == "__main__":
    main()
