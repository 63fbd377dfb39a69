"""The loop's own cost over a hand-written loop, beside Accelerate's, in the same process: A B C A B C …, and its parts.

python -m bench.loop [--windows N] [--rounds 3] [--json F]

A step of about 2 ms on one core: an MLP, AdamW. Every loop collates the same samples and clips. memfit is the whole of
``memfit.train.loop.loop.train``: recovery, monitors, watchdog, lines of metrics and samples for each window, which this
thread writes; no validation, no saving.
Each loop has a thread, and hands on to the next after 20 windows: what disturbs the machine falls on all of them alike.
A window's time is that of its thread on a core; the first of a turn, with cold caches, is left out. Printed: what the
windows of a turn take, and what that adds to the hand-written loop's turn beside it, as means over turns without the
twentieth at each end: lines of windows are written five times a second, which a median would leave out.

Then memfit's loop runs once more, alone, with its functions timed: what each part takes for itself, without the parts
that it calls, as means over windows. The sum of the parts is less than what the loop adds: between two operators of
torch other code has run, so that they find colder caches than in a short loop.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from scipy.stats import trim_mean
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.part_timer import PartTimer
from bench.result_file import add_json_option, target, write_result
from memfit.apply.train_state import build
from memfit.batch.windows import Windows
from memfit.engine.single import Single
from memfit.job import Job, Loss
from memfit.plan import Plan
from memfit.train.launch.watchdog import Watchdog
from memfit.train.loop.loop import train
from memfit.train.loop.run_context import RunContext
from memfit.train.run_folder import RunFolder

BATCH, WIDTH = 32, 256
TURN, COLD = 20, 2
"""Windows of a turn, and how many of them find the caches cold."""
TRIMMED = 0.05
"""The part of the turns that is left out at each end."""


class AlternatingThreads:
    """Threads that run one after another, each until it calls ``hand_on``."""

    def __init__(self, names: list[str]) -> None:
        self._batons = {name: threading.Semaphore(0) for name in names}
        self._next = dict(zip(names, [*names[1:], names[0]], strict=True))
        self._batons[names[0]].release()
        self.stamps: dict[str, list[int]] = {name: [] for name in names}
        """Nanoseconds of each thread on a core, at each of its windows."""

    def wait(self, name: str) -> None:
        self._batons[name].acquire()

    def hand_on(self, name: str) -> None:
        self.stamps[name].append(time.thread_time_ns())
        if len(self.stamps[name]) % TURN == 0:
            self._batons[self._next[name]].release()
            self.wait(name)

    def leave(self, name: str) -> None:
        before = next(other for other, after in self._next.items() if after == name)
        self._next[before] = self._next.pop(name)
        self._batons[self._next[before]].release()


class Net(Job):
    clip: float | None = 1.0

    def __init__(self, hand_on: Callable[[], None]) -> None:
        super().__init__()
        self._hand_on = hand_on

    def nets(self):
        torch.manual_seed(0)
        return {"net": nn.Sequential(nn.Linear(64, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(),
                                     nn.Linear(WIDTH, 1))}  # fmt: skip

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-4)}

    def batch(self, shape):
        return [torch.randn(shape.items, 64), torch.randn(shape.items)]

    def dataset(self):
        x = torch.randn(BATCH * 64, 64, generator=torch.Generator().manual_seed(0))
        return list(zip(x, x.sum(1), strict=True))

    def collate(self, samples):
        self._hand_on()
        return super().collate(samples)

    def loss(self, nets, batch):
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1]).square()
        return Loss(error.sum(), len(error))


def ours(job: Net, windows: int, folder: Path) -> None:
    plan = Plan(
        job="", settings={}, device="cpu", budget_bytes=1 << 30, unit="samples", global_batch=BATCH,
        micro_batch=BATCH, micro_batches=[[BATCH]], arithmetic="", engine="single", precision="fp32", seed=0,
    )  # fmt: skip
    run = RunFolder(folder / "run")
    run.open(resume=False)
    train_state, samples = build(job, "cpu", Single()), job.dataset()
    context = RunContext(
        plan=plan, folder=run, samples=samples, lengths=None, first=0, last=windows,
        windows=windows_of(samples), saver=_NoSaver(), progress=Watchdog(run, rank=0, world=1).progress,
    )  # fmt: skip
    with patch("signal.signal"):  # only a main thread may set handlers of signals
        train(train_state, context)


def windows_of(samples: Sequence[object]) -> Windows:
    """The samples of each step, the same in every loop."""
    return Windows(size=len(samples), lengths=None, global_batch=BATCH, micro_batch=BATCH)


class _NoSaver:
    written = None

    def due(self):
        return False

    def nothing(self, *arguments):
        return True

    warm = save = finish = nothing


def batches(job: Net, windows: int) -> Iterator[list[torch.Tensor]]:
    samples = job.dataset()
    order = windows_of(samples)
    for number in range(windows):
        yield job.collate([samples[i] for i in order.window(number).ids])


def by_hand(job: Net, windows: int, folder: Path) -> None:
    net = job.nets()["net"]
    (optimizer,) = job.optimizers({"net": net}).values()
    for batch in batches(job, windows):
        total, units = job.loss({"net": net}, batch)
        (total / units).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def accelerate(job: Net, windows: int, folder: Path) -> None:
    from accelerate import Accelerator

    net = job.nets()["net"]
    (optimizer,) = job.optimizers({"net": net}).values()
    accelerator = Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(net, optimizer)
    for batch in batches(job, windows):
        with accelerator.accumulate(net):
            total, units = job.loss({"net": net}, batch)
            accelerator.backward(total / units)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


LOOPS = {"by hand": by_hand, "memfit": ours, "accelerate": accelerate}

APPLY, LOOP, TRAIN = "memfit.apply.window", "memfit.train.loop.loop", "memfit.train"
PARTS = {
    "the step, as by hand": [
        f"{__name__}:Net.collate", f"{__name__}:Net.loss", "torch:Tensor.backward", "torch.nn.utils:clip_grad_norm_",
        "memfit.engine.torch_optim_mixin:TorchOptimMixin.step",
        "memfit.engine.torch_optim_mixin:TorchOptimMixin.zero_grad",
    ],
    "lines of metrics and samples, written to disk": [
        f"{LOOP}:numbers_of", f"{LOOP}:TrainingLoop._report",
        f"{TRAIN}.run_folder:RunFolder.append_soon", f"{TRAIN}.run_folder:RunFolder.write_waiting",
    ],
    "random streams of reading and of the loss": [
        f"{TRAIN}.data.reader:seed_stream", f"{TRAIN}.loop.run_context:seed_stream",
    ],
    "what lets a step be applied once": [f"{TRAIN}.recovery.exactly_once:ExactlyOnce.__call__"],
    "what lets a forward be repeated": [
        "memfit.apply.buffer_snapshot:BufferSnapshot.keep", "memfit.apply.buffer_snapshot:BufferSnapshot.learn",
        f"{TRAIN}.recovery.recovery:Recovery._gradients", f"{TRAIN}.recovery.recovery:Recovery.begin",
        f"{TRAIN}.recovery.recovery:Recovery.end",
    ],
    "losses by valid units, checked": [
        f"{APPLY}:losses_of", f"{APPLY}:summed", f"{APPLY}:known_units", f"{APPLY}:_none_valid",
        f"{LOOP}:check_gradients",
    ],
    "order and reading of the samples": [
        "memfit.batch.windows:Windows.window", f"{LOOP}:micro_batches", f"{TRAIN}.data.reader:BatchReader.read",
        f"{TRAIN}.loop.run_context:on_device",
    ],
    "memory, speed, alarms, watchdog": [
        f"{TRAIN}.loop.monitor:Monitor.begin", f"{TRAIN}.loop.monitor:Monitor.end", f"{LOOP}:TrainingLoop._mark",
        f"{TRAIN}.loop.memory_reports:MemoryReports.warn_of_growth",
        f"{TRAIN}.loop.validations:Validations.after",
    ],
    "the window's own code": [
        f"{LOOP}:run_window", f"{APPLY}:_gradients", f"{APPLY}:_backwards", f"{APPLY}:_finish_gradients",
        f"{APPLY}:_turns", f"{APPLY}:_after_the_steps", f"{LOOP}:TrainingLoop._learn",
        f"{LOOP}:TrainingLoop._train_window",
    ],
}  # fmt: skip
"""The functions of a window, by what they are for."""


def main() -> None:
    """Prints and writes what each loop takes, round by round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    add_json_option(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rounds = []
    for number in range(asked.rounds):
        rounds.append(measure(asked.windows))
        for name, row in rounds[-1].items():
            print(f"{number} {name:11} {row['milliseconds']:.3f} ms a step   {row['added_milliseconds']:+.3f} ms")
    parts = microseconds_of_parts(asked.windows)
    for name, value in sorted(parts.items(), key=lambda part: -part[1]):
        print(f"{value:7.1f} us  {name}")
    figures = {"windows": asked.windows, "rounds": rounds, "microseconds_of_parts": parts}
    write_result(target(asked.json), figures, packages=["accelerate"])


def microseconds_of_parts(windows: int) -> dict[str, float]:
    """What each part of a window takes for itself."""
    timer = PartTimer(PARTS)
    with tempfile.TemporaryDirectory() as folder, timer.timing():
        ours(Net(timer.next_turn), windows, Path(folder))
    return timer.microseconds(cold=TURN)


def measure(windows: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step of every loop, and what it adds to the hand-written one's: trimmed means over turns."""
    turns = AlternatingThreads(list(LOOPS))

    def run(name: str) -> None:
        turns.wait(name)
        with tempfile.TemporaryDirectory() as folder:
            LOOPS[name](Net(lambda: turns.hand_on(name)), windows, Path(folder))
        turns.leave(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in LOOPS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    turns_of = {name: _turns(stamps) for name, stamps in turns.stamps.items()}
    rows = {}
    for name, times in turns_of.items():
        added = [took - base for took, base in zip(times, turns_of["by hand"], strict=True)]
        rows[name] = {
            "milliseconds": float(trim_mean(times, TRIMMED)), "added_milliseconds": float(trim_mean(added, TRIMMED)),
        }  # fmt: skip
    return rows


def _turns(stamps: list[int]) -> list[float]:
    """Milliseconds of a window, for each turn but the first; a turn ends with a stamp, and another thread's turn."""
    starts = range(TURN + COLD, len(stamps) - TURN, TURN)
    return [(stamps[start + TURN - COLD - 1] - stamps[start]) / 1e6 / (TURN - COLD - 1) for start in starts]


if __name__ == "__main__":
    main()
