"""Jobs on data sets that libraries of streams give: webdataset, Hugging Face datasets, mosaicml-streaming.

``write_samples`` writes the files of one of them; the job reads them in the folder that STREAM_FOLDER names.
"""

import json
import os
import random
from pathlib import Path

import torch
from torch import nn

from memfit import Job, Loss

COUNT = 40
"""Samples of an epoch: no multiple of a window."""


def values(number):
    """A sample: four numbers, and what is learned from them."""
    x = [((number * 7 + i * 3) % 11) / 11 for i in range(4)]
    return {"x": x, "y": sum(x) + number % 3}


def write_samples(library, folder):
    """Writes COUNT samples, in several files."""
    folder.mkdir(parents=True, exist_ok=True)
    if library.startswith("datasets"):
        for part in range(4):
            lines = [json.dumps(values(number)) for number in range(part * 10, part * 10 + 10)]
            (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    elif library.startswith("webdataset"):
        import webdataset

        for part in range(4):
            with webdataset.TarWriter(str(folder / f"{part}.tar")) as shard:
                for number in range(part * 10, part * 10 + 10):
                    shard.write({"__key__": f"{number:04d}", "json": values(number)})
    else:
        from streaming import MDSWriter

        with MDSWriter(out=str(folder), columns={"x": "json", "y": "float64"}, size_limit=600) as writer:
            for number in range(COUNT):
                writer.write(values(number))


def folder():
    return Path(os.environ["STREAM_FOLDER"])


class Streamed(Job):
    windows: int = 8

    def nets(self):
        torch.manual_seed(0)
        return {"net": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-2)}

    def batch(self, shape):
        return torch.randn(shape.items, 4), torch.randn(shape.items)

    def collate(self, samples):
        return torch.tensor([s["x"] for s in samples]), torch.tensor([s["y"] for s in samples], dtype=torch.float32)

    def loss(self, nets, batch):
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1]).square()
        return Loss(error.sum(), len(error))


class Datasets(Streamed):
    def dataset(self):
        from datasets import load_dataset

        files = sorted(map(str, folder().glob("*.jsonl")))
        return load_dataset("json", data_files=files, split="train", streaming=True)


class DatasetsShuffled(Datasets):
    def dataset(self):
        return super().dataset().shuffle(seed=1, buffer_size=16)


class WebDataset(Streamed):
    def dataset(self):
        import webdataset

        files = sorted(map(str, folder().glob("*.tar")))
        return self.shuffled(webdataset.WebDataset(files, shardshuffle=False, nodesplitter=None).decode()).map(
            lambda sample: sample["json"]
        )

    def shuffled(self, stream):
        return stream


class WebDatasetShuffled(WebDataset):
    def shuffled(self, stream):
        return stream.shuffle(16, rng=random.Random(1))


class Mosaic(Streamed):
    def dataset(self):
        from streaming import StreamingDataset

        return StreamingDataset(local=str(folder()), shuffle=False, batch_size=4)
