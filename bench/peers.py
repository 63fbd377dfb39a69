"""Estimators of training memory beside memfit, on the same steps, against what the steps really took on this CPU.

python -m bench.peers [--rounds 2] [--json F]

Every tool is given the same net, optimizer, type and batch, and runs in a process of its own; rounds take the tools in
a random order. "bytes" are those of tensors at the peak of training: without what a tool adds for the CUDA context,
fragmentation or safety. The truth is the CPU allocator's events over a real step. Tools that no other package brings
are installed from the registry into bench/.peers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.result_file import ROOT, add_json_option, target, write_result

FOLDER = ROOT / "bench" / ".peers"
INSTALLED = ("torch-kitsune==0.7.0", "vram-check==0.1.1", "fitcheck-llm==0.3.1")


class NotApplicableError(Exception):
    """A tool does not answer for a kind of step."""


def by_memfit(work: Any) -> int:
    """memfit predict on this machine's processor."""
    from memfit.device.hardware.catalogue import find_device, with_memory
    from memfit.job import Shape
    from memfit.planner.predict import predict

    device = with_memory(find_device("cpu"), 1 << 40)
    return predict(work, "work", Shape(items=work.items), device).footprint.phases["train"].allocated_bytes


def by_mem_tracker(work: Any) -> int:
    """torch.distributed's MemTracker over two steps of fake tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from memfit.job import Shape

    with FakeTensorMode():
        net = work.nets()["net"]
        optimizer = work.optimizers({"net": net})["adamw"]
        tracker = MemTracker()
        tracker.track_external(net, optimizer)
        with tracker:
            for number in range(2):
                work.output(net, work.batch(Shape(items=work.items))).backward()
                optimizer.step()
                optimizer.zero_grad()
                if not number:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return int(peak["Total"])


def by_kitsune(work: Any) -> int:
    """torch-kitsune's predict_memory, less its overhead."""
    from kitsune.predict import predict_memory  # type: ignore[import-not-found]

    answer = predict_memory(work.nets()["net"], work.input_shape, batch_size=work.items, optimizer="adamw")
    return int(answer.total_bytes - answer.overhead_bytes)


def by_vram_check(work: Any) -> int:
    """vram-check's analyze."""
    from vram_check import analyze  # type: ignore[import-not-found]

    length = work.input_shape[0] if len(work.input_shape) == 1 else 128
    answer = analyze(work.nets()["net"], batch_size=work.items, optimizer="adamw", seq_len=length)
    return int(answer["estimate"].total_bytes)


def by_fitcheck(work: Any) -> int:
    """fitcheck-llm's estimate of full fine-tuning in fp32, less its overhead."""
    if not hasattr(work, "config"):
        raise NotApplicableError("it takes decoders of language alone")
    from fitcheck.config_parser import ModelConfig, _count_params, _parse_fields  # type: ignore[import-not-found]
    from fitcheck.estimator import TrainingConfig, estimate  # type: ignore[import-not-found]
    from fitcheck.gpu_db import GPU_DB  # type: ignore[import-not-found]

    fields = _parse_fields(work.config().to_dict())
    names = ("hidden_size", "num_layers", "num_attention_heads", "num_kv_heads", "intermediate_size", "vocab_size",
             "head_dim", "tie_word_embeddings")  # fmt: skip
    model = ModelConfig(
        name="llama", num_params=_count_params(fields), **{name: getattr(fields, name) for name in names}
    )
    how = TrainingConfig(precision="fp32", batch_size=work.items, seq_len=work.input_shape[0], lora_rank=None)
    answer = estimate(model, how, next(iter(GPU_DB.values())))
    return int((answer.total_mib - answer.overhead_mib) * (1 << 20))


def by_accelerate(work: Any) -> int:
    """accelerate estimate-memory: four times the weights."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    weights, _ = calculate_maximum_sizes(work.nets()["net"])
    return int(estimate_training_usage(weights, "float32")["step"])


def by_deepspeed(work: Any) -> int:
    """DeepSpeed's estimate of ZeRO-2's model states on one card, without offload."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    count = sum(parameter.numel() for parameter in work.nets()["net"].parameters())
    return int(estimate_zero2_model_states_mem_needs(count, cpu_offload=False)[1])


TOOLS: dict[str, tuple[str, Callable[[Any], int]]] = {
    "memfit": ("memfit", by_memfit),
    "MemTracker": ("torch", by_mem_tracker),
    "torch-kitsune": ("torch-kitsune", by_kitsune),
    "vram-check": ("vram-check", by_vram_check),
    "fitcheck-llm": ("fitcheck-llm", by_fitcheck),
    "Accelerate's estimator": ("accelerate", by_accelerate),
    "DeepSpeed's estimator": ("deepspeed", by_deepspeed),
}
"""(distribution, estimate) by name."""


def measured(work: Any) -> int:
    """Bytes of tensors at the peak of a real step on this processor."""
    from memfit.device.hardware.catalogue import find_device
    from memfit.job import Shape
    from memfit.trace.step import Tracing, trace_job
    from testing.truth import measured_peaks, operator_names

    shape = Shape(items=work.items)
    names = operator_names(trace_job(work, shape, Tracing(device=find_device("cpu"))))
    return measured_peaks(work, shape, 1, names, {})["train"].allocated_bytes


def answer_of(work: str, tool: str) -> dict[str, Any]:
    """What one process says: bytes, its seconds and its memory; or why there are none."""
    from bench.peers_works import WORKS

    begin, used = time.perf_counter(), time.process_time()
    try:
        asked = WORKS[work]()
        answer: dict[str, Any] = {"bytes": measured(asked) if tool == "measured" else TOOLS[tool][1](asked)}
    except Exception as error:
        answer = {"bytes": None, "why": str(error).strip().splitlines()[-1][:120] or type(error).__name__}
    seconds = {"clock": time.perf_counter() - begin, "processor": time.process_time() - used}
    return answer | seconds | {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def asked_apart(work: str, tool: str) -> dict[str, Any]:
    """``answer_of`` in a process of its own, imports included."""
    folder = next(FOLDER.glob("lib/python*/site-packages"))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "bench.peers", "--one", work, tool]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"bytes": None, "why": f"exit code {done.returncode}", "clock": 0.0, "processor": 0.0, "peak_mib": 0.0}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def install() -> None:
    """Makes bench/.peers; the tools' dependencies come from this environment."""
    if not FOLDER.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        subprocess.run([FOLDER / "bin/python", "-m", "pip", "install", "-q", "--no-deps", *INSTALLED], check=True)


def version_of(distribution: str) -> str:
    """A tool's version; of memfit, that of the commit in the file's header."""
    folder = next(FOLDER.glob("lib/python*/site-packages"))
    own = importlib.metadata.distributions(path=[str(folder)])
    installed = {item.metadata["Name"]: item.version for item in own}
    return installed.get(distribution) or importlib.metadata.version(distribution)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", nargs=2, metavar=("WORK", "TOOL"), help="answer in this process")
    add_json_option(parser)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(answer_of(*options.one)))
        return
    install()
    from bench.peers_works import WORKS

    chance, rows = random.Random(0), []
    for work in WORKS:
        truth = asked_apart(work, "measured")["bytes"]
        answers: dict[str, list[dict[str, Any]]] = {tool: [] for tool in TOOLS}
        for _ in range(options.rounds):
            for tool in chance.sample(list(TOOLS), len(TOOLS)):
                answers[tool].append(asked_apart(work, tool))
        for tool, all_rounds in answers.items():
            row = {"work": work, "tool": tool, "measured_bytes": truth, **_row(all_rounds)}
            row["error"] = None if row["bytes"] is None else row["bytes"] / truth - 1
            rows.append(row)
            print(row, flush=True)
    versions = {tool: version_of(distribution) for tool, (distribution, _) in TOOLS.items()}
    write_result(target(options.json), {"rounds": options.rounds, "tools": versions, "rows": rows})


def _row(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [answer["processor"] for answer in rounds]
    return {
        "bytes": rounds[0]["bytes"], "why": rounds[0].get("why", ""),
        "same_each_round": len({answer["bytes"] for answer in rounds}) == 1,
        "processor_seconds": {"least": min(seconds), "median": statistics.median(seconds), "most": max(seconds)},
        "clock_seconds": statistics.median(answer["clock"] for answer in rounds),
        "peak_mib": max(answer["peak_mib"] for answer in rounds),
    }  # fmt: skip


if __name__ == "__main__":
    main()
