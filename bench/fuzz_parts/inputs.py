"""One spoiled input of each kind, given to the command that reads it."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import tomli_w
import torch

from bench.fuzz_parts.failures import EXAMPLES, FailureInputs
from bench.fuzz_parts.jobs import GOOD, LENGTHS, spoiled_job
from bench.fuzz_parts.spoil import WORDS, spoil_bytes, spoil_lines, spoil_value, without_none
from memfit import toml
from memfit.apply.train_state import build
from memfit.cli import main
from memfit.errors import InputError
from memfit.loading import load_job
from memfit.plan import read_plan
from memfit.train.checkpoint.checkpoints import Checkpoints, _with_checksum
from memfit.train.checkpoint.resume import restore
from memfit.train.checkpoint.saver import Saver
from memfit.train.checkpoint.sharded_checkpoint import load_sharded, save_sharded

CARD = ("--device", "rtx4090")
SETTINGS = ("width", "rate", "shuffle", "kind", "windows", "clip", "ema", "precision", "validate_every", "no_such")


CARDS = b"""\
[my-card]
name = "NVIDIA My Card"
compute_capability = [8, 6]
memory_bytes = 12622168064
usable_bytes = { value = 12000000000, source = "nvidia-smi" }
bf16_flops = 51.2e12
bandwidth = 360.0e9
"""


class Inputs(FailureInputs):
    """Good inputs of every kind, made once, and a case of each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, folder / "case"
        (folder / "job.py").write_text(GOOD)
        self.job, self.long = f"{folder}/job.py:Good", f"{folder}/job.py:Long"
        self._quietly("plan", self.job, "--global-batch", "4", "--memory", "1GiB", "--out", f"{folder}/plan.toml")
        self.plan = (folder / "plan.toml").read_bytes()
        files = ("--trace", f"{folder}/t.npz", "--snapshot", f"{folder}/s.pickle")
        self._quietly("predict", self.job, *CARD, "--micro-batch", "2", *files)
        self.trace, self.snapshot = (folder / "t.npz").read_bytes(), (folder / "s.pickle").read_bytes()
        self._checkpoints()
        self._modules = set(sys.modules)
        self.clean()

    def kinds(self) -> list[str]:
        """The kinds of input."""
        return [name.removeprefix("_case_") for name in dir(self) if name.startswith("_case_")]

    def case(self, kind: str, chance: random.Random) -> Any:
        """Spoils an input of a kind and reads it; the exit code."""
        run: Callable[[random.Random], Any] = getattr(self, f"_case_{kind}")
        return run(chance)

    def clean(self) -> None:
        """Removes what a case left behind."""
        shutil.rmtree(self.now, ignore_errors=True)
        self.now.mkdir()
        for name in set(sys.modules) - getattr(self, "_modules", set(sys.modules)):
            if str(self.folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]

    def _case_job(self, chance: random.Random) -> Any:
        (self.now / "job.py").write_bytes(spoiled_job(chance))
        verb = chance.choice((["predict", *CARD], ["plan", "--global-batch", "4", *CARD]))
        return main([verb[0], f"{self.now}/job.py:Good", *verb[1:]])

    def _case_name(self, chance: random.Random) -> Any:
        name = spoil_bytes(self.job.encode(), chance).decode("utf-8", "replace").replace("\x00", "")
        return main(["predict", *CARD, "--", name])

    def _case_setting(self, chance: random.Random) -> Any:
        pairs = []
        for _ in range(chance.choice((1, 1, 2))):
            word = chance.choice((*WORDS, "8", "16", "plain", "0.5", "fp16", "bf16"))
            pairs += ["--set", f"{chance.choice(SETTINGS)}={word}"]
        return main(["predict", self.job, *CARD, *pairs])

    def _case_option(self, chance: random.Random) -> Any:
        """Any option of any verb that writes nothing elsewhere, with any word."""
        verbs = "predict", "plan", "devices", "jobs", "export", "report", "max", "cards", "compare", "explain", "lint"
        verb = chance.choice(verbs)
        command = __import__(f"memfit.cli.{verb}", fromlist=["command"]).command
        words = {
            "predict": [self.job],
            "plan": [self.job, "--global-batch", "4"],
            "export": [],
            "report": [],
            "devices": [],
            "explain": [],
            "lint": [],
        }
        arguments = [*words.get(verb, [self.job])]
        files = ("--out", "--trace", "--snapshot")
        options = [
            option
            for option in command.params
            if isinstance(option, click.Option) and not set(files) & set(option.opts)
        ]
        for option in chance.sample(options, min(len(options), chance.choice((1, 1, 2, 3)))):
            arguments.append(option.opts[0])
            if not option.is_flag:
                arguments.append(self._word(chance))
        return main([verb, *arguments])

    def _word(self, chance: random.Random) -> str:
        good = ("1", "2", "4", "1GiB", "64MiB", "rtx4090", "cpu", "ddp", "fsdp2", "fp16", "bf16", "all", "2x8", "sqrt")
        return chance.choice(WORDS + good * 3).replace("\x00", "").encode("utf-8", "replace").decode()[:300]

    def _case_plan(self, chance: random.Random) -> Any:
        return self._with_plan(self._spoiled_plan(chance), chance)

    def _case_plan_values(self, chance: random.Random) -> Any:
        values = without_none(spoil_value(toml.loads(self.plan.decode()), chance))
        return self._with_plan(
            tomli_w.dumps(values if isinstance(values, dict) else {}).encode("utf-8", "replace"), chance
        )

    def _with_plan(self, content: bytes, chance: random.Random) -> Any:
        path = self.now / "p.toml"
        path.write_bytes(content)
        to = chance.choice(("deepspeed", "accelerate", "torchrun"))
        out = ["--out", f"{self.now}/out"]
        verb = chance.choice((["export", "--to", to, *out], ["report", *out], ["report", "--no-trace", *out]))
        return main([verb[0], str(path), *verb[1:]])

    def _spoiled_plan(self, chance: random.Random) -> bytes:
        return chance.choice((spoil_bytes, spoil_lines))(self.plan, chance)

    def _case_trace(self, chance: random.Random) -> Any:
        path = self.now / "t.npz"
        if chance.random() < 0.3:
            path.write_bytes(spoil_bytes(self.trace, chance))
        else:
            _spoil_archive(self.trace, path, chance)
        return main(["report", str(path), *chance.choice(([], ["--no-trace"])), "--out", f"{self.now}/o.html"])

    def _case_run(self, chance: random.Random) -> Any:
        """A run's folder of which one file is spoiled."""
        run = self.now / "run"
        shutil.copytree(self.folder / "run", run)
        path = chance.choice([file for file in run.iterdir() if file.is_file()])
        path.write_bytes(chance.choice((spoil_bytes, spoil_lines, _spoil_json_lines))(path.read_bytes(), chance))
        return main(["report", str(run), "--no-trace", "--out", f"{self.now}/o.html"])

    def _case_cache(self, chance: random.Random) -> Any:
        """What memfit kept of this machine, spoiled."""
        cache, kept = self.folder / "cache", self.folder / "cache-kept"
        if not kept.exists():
            shutil.copytree(cache, kept)
        try:
            files = [path for path in cache.rglob("*") if path.is_file()]
            for path in chance.sample(files, min(len(files), 2)):
                path.write_bytes(chance.choice((spoil_bytes, _spoil_json))(path.read_bytes(), chance))
            return main(["plan", self.job, "--global-batch", "4", "--memory", "1GiB"])
        finally:
            shutil.rmtree(cache)
            shutil.copytree(kept, cache)

    def _case_shapes(self, chance: random.Random) -> Any:
        path = self.now / "shapes.txt"
        path.write_bytes(chance.choice((spoil_bytes, spoil_lines))(b"2x8\n3x16 1x16\n2x12\n", chance))
        return main(["predict", self.long, *CARD, "--shapes", str(path)])

    def _case_lengths(self, chance: random.Random) -> Any:
        ending = chance.choice(("csv", "jsonl", "tsv"))
        path = self.now / f"lengths.{ending}"
        path.write_bytes(chance.choice((spoil_bytes, spoil_lines))(LENGTHS[ending], chance))
        return main(["predict", self.long, *CARD, "--micro-batch", "32", "--epoch", "3", "--lengths", f"{path}:frames"])

    def _case_cards(self, chance: random.Random) -> Any:
        """A file of cards that is added, or was added before."""
        path, own = self.now / "cards.toml", self.folder / "config" / "memfit" / "devices.toml"
        content = chance.choice((spoil_bytes, spoil_lines))(CARDS, chance)
        if chance.random() < 0.5:
            changed = without_none(spoil_value(toml.loads(CARDS.decode()), chance))
            content = tomli_w.dumps(changed if isinstance(changed, dict) else {}).encode("utf-8", "replace")
        try:
            if chance.random() < 0.5:
                path.write_bytes(content)
                return main(["devices", "--add", str(path)])
            own.parent.mkdir(parents=True, exist_ok=True)
            own.write_bytes(content)
            return main(["predict", self.job, "--device", chance.choice(("my-card", "rtx4090")), "--micro-batch", "2"])
        finally:
            own.unlink(missing_ok=True)

    def _case_prices(self, chance: random.Random) -> Any:
        path = self.now / "prices.csv"
        path.write_bytes(chance.choice((spoil_bytes, spoil_lines))((EXAMPLES / "prices.csv").read_bytes(), chance))
        return main(["cards", self.job, "--prices", str(path)])

    def _case_checkpoint(self, chance: random.Random) -> Any:
        """One of its files damaged, or its manifest rewritten with a right checksum."""
        folder = self.now / "checkpoints"
        shutil.copytree(self.folder / "checkpoints", folder)
        for place in folder.iterdir():
            if chance.random() < 0.5:
                path = chance.choice([file for file in place.rglob("*") if file.is_file()])
                path.write_bytes(chance.choice((spoil_bytes, spoil_lines))(path.read_bytes(), chance))
            else:
                path = place / "manifest.json"
                manifest = json.loads(path.read_bytes())
                manifest.pop("crc32")
                changed = spoil_value(manifest, chance)
                with contextlib.suppress(ValueError, TypeError):
                    path.write_bytes(
                        _with_checksum(changed) if isinstance(changed, dict) else json.dumps(changed).encode()
                    )
        return self._answer(lambda: self._restored(folder))

    def _restored(self, folder: Path) -> None:
        checkpoint = Checkpoints(folder).newest(lambda line: None)
        if checkpoint is not None and checkpoint.parts is None:
            restore(self._state(), checkpoint)
        elif checkpoint is not None and checkpoint.parts is not None:
            load_sharded(self._state(), checkpoint.parts)

    def _case_parts(self, chance: random.Random) -> Any:
        """Parts without a manifest: their index says other things."""
        folder = self.now / "parts"
        shutil.copytree(self.folder / "parts", folder)
        index = folder / "parts.json"
        if chance.random() < 0.6:
            index.write_text(json.dumps(spoil_value(json.loads(index.read_text()), chance)))
        else:
            path = chance.choice(sorted(folder.iterdir()))
            path.write_bytes(spoil_bytes(path.read_bytes(), chance))
        return self._answer(lambda: load_sharded(self._state(), folder))

    def _answer(self, read: Callable[[], Any]) -> int:
        """As the command line answers: 2 and one line for bad input."""
        try:
            read()
        except InputError as error:
            click.echo(f"memfit: {error}", err=True)
            return 2
        return 0

    def _state(self) -> Any:
        return build(load_job(self.job), torch.device("cpu"))

    def _checkpoints(self) -> None:
        """Two checkpoints of a small run, its folder, and its state in parts."""
        plan, state = read_plan(self.folder / "plan.toml"), self._state()
        state.nets["net"](torch.zeros(2, 8)).square().sum().backward()
        state.optimizers["adam"].step()
        for window in (1, 2):
            Saver(checkpoints=Checkpoints(self.folder / "checkpoints"), plan=replace(plan)).save(state, window)
        save_sharded(state, self.folder / "parts")
        run = self.folder / "run"
        run.mkdir()
        (run / "plan.toml").write_bytes(self.plan)
        line = {
            "window": 0, "loss": 1.5, "losses": {"loss": 1.5}, "units": {"loss": 4}, "seconds": 0.1,
            "units_per_second": 40.0, "global_batch_asked": 4, "global_batch_done": 4, "retries": 0,
            "measured_process_bytes": 1 << 20, "predicted_process_bytes": 1 << 20,
            "noise_scale": None, "validation": None,
        }  # fmt: skip
        metrics = [json.dumps({**line, "window": window}) for window in range(6)]
        samples = [json.dumps({"window": window, "rank": 0, "ids": [1, 2, 3, 4]}) for window in range(6)]
        (run / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
        (run / "samples.jsonl").write_text("\n".join(samples) + "\n")
        (run / "flight.json").write_text(json.dumps({"window": 3, "phase": "train", "requested_bytes": 100, "rank": 0}))

    def _quietly(self, *arguments: str) -> None:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                main(arguments)
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(said.getvalue()) from None


def _spoil_archive(content: bytes, path: Path, chance: random.Random) -> None:
    """An archive of numpy's files, one of them spoiled or left out; its own checksums are right."""
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(path, "w") as new:
        names = old.namelist()
        chosen = chance.choice(names)
        for name in names:
            part = old.read(name)
            if name == chosen:
                if chance.random() < 0.1:
                    continue
                part = (
                    _spoil_text(part, chance)
                    if b"memfit_trace" in part[:4096] or chance.random() < 0.2
                    else spoil_bytes(part, chance)
                )
            new.writestr(name, part)


def _spoil_text(part: bytes, chance: random.Random) -> bytes:
    """numpy's file of one JSON text, with one of its values replaced."""
    import numpy as np

    try:
        text = str(np.load(io.BytesIO(part), allow_pickle=False))
        changed = json.dumps(spoil_value(json.loads(text), chance))
    except ValueError:
        return spoil_bytes(part, chance)
    out = io.BytesIO()
    np.save(out, np.array(changed), allow_pickle=False)
    return out.getvalue()


def _spoil_json(content: bytes, chance: random.Random) -> bytes:
    try:
        return json.dumps(spoil_value(json.loads(content), chance)).encode()
    except ValueError:
        return spoil_bytes(content, chance)


def _spoil_json_lines(content: bytes, chance: random.Random) -> bytes:
    lines = content.split(b"\n")
    at = chance.randrange(len(lines))
    lines[at] = _spoil_json(lines[at] or b"{}", chance)
    return b"\n".join(lines)
