"""Data made up on the spot for the training scripts of ``bench.upstream_scripts``, in the forms that they read."""

from __future__ import annotations

import json
import random
import sys
from array import array
from pathlib import Path
from typing import Any

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
BERT = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 28996, "max_position_embeddings": 512,
}  # fmt: skip
"""The configuration of bert-base-cased."""
PAIRS, PETS, PICTURES = 160, 256, 64
METRIC = """
import datasets
import evaluate
class Metric(evaluate.Metric):
    def _info(self):
        whole = datasets.Value("int64")
        features = datasets.Features({"predictions": whole, "references": whole})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)
    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(references)}
"""
PAIRS_CARD = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: train.jsonl
  - split: validation
    path: validation.jsonl
---
"""


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


def random_sentences(folder: Path) -> None:
    """GLUE's paraphrases, its metric, and bert-base-cased without weights, under the names by which they are loaded."""
    (folder / "bert-base-cased").mkdir()
    (folder / "bert-base-cased" / "config.json").write_text(json.dumps(BERT))
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"w{number}" for number in range(BERT["vocab_size"] - len(known))]
    (folder / "bert-base-cased" / "vocab.txt").write_text("\n".join([*known, *words]) + "\n")
    pairs = folder / "nyu-mll" / "glue"
    pairs.mkdir(parents=True)
    (pairs / "README.md").write_text(PAIRS_CARD)
    for split in ("train", "validation"):
        rows = [_pair(words, number) for number in range(PAIRS)]
        (pairs / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)


def _pair(words: list[str], number: int) -> dict[str, Any]:
    first, second = (" ".join(random.choices(words, k=random.randint(10, 40))) for _ in range(2))
    return {"sentence1": first, "sentence2": second, "label": number % 2, "idx": number}


def random_pets(folder: Path) -> None:
    """Pictures named by their breed, as those of the Oxford-IIIT Pet Dataset."""
    _pictures(folder / "images", [f"{'cat' if k % 2 else 'dog'}_{k}.jpg" for k in range(PETS)], 256)


def random_pictures(folder: Path) -> None:
    """A folder of pictures."""
    _pictures(folder / "pictures", [f"{k}.png" for k in range(PICTURES)], 80)


def _pictures(folder: Path, names: list[str], size: int) -> None:
    from PIL import Image

    folder.mkdir()
    for name in names:
        Image.frombytes("RGB", (size, size), random.randbytes(3 * size * size)).save(folder / name)
