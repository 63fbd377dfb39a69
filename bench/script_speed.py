"""What ``memfit trace`` takes on two scripts: processor seconds and the host's memory.

python -m bench.script_speed [--json F]

gpt2 is a loop over transformers' GPT-2 of 124 million parameters, bf16 autocast, batch 4 x 1024; llama makes a Llama
of 7 billion parameters from its configuration and trains it with checkpointing and AdamW, in bf16, batch 1 x 2048.
Bounds of the project: 12 s for the first, 25 s and 1 GiB for the second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.result_file import add_json_option, target, write_result

GPT2 = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
net = GPT2LMHeadModel(GPT2Config()).cuda()
optimizer = torch.optim.AdamW(net.parameters(), 3e-4, fused=True)
for step in range(100):
    ids = torch.randint(0, 50257, (4, 1024), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = net(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
net = LlamaForCausalLM(LlamaConfig()).to(torch.bfloat16).cuda()
net.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(net.parameters(), 1e-5)
for step in range(100):
    ids = torch.randint(0, 32000, (1, 2048), device="cuda")
    net(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def measure(name: str, script: str) -> dict[str, Any]:
    """One trace with two steps, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(script)
        options = ["--steps", "2", "--device", "a100-80gb", "--json", "answer.json"]
        command = [sys.executable, "-m", "memfit", "trace", *options, "--", "python", "train.py"]
        with open(Path(folder) / "said.txt", "w") as said:
            process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
            used = os.wait4(process.pid, 0)[2]
        answer = json.loads((Path(folder) / "answer.json").read_text())
    if answer["windows"] < 2:
        raise SystemExit(f"{name}: {answer['ended']}")
    return {
        "script": name, "processor_seconds": used.ru_utime + used.ru_stime,
        "script_processor_seconds": answer["processor_seconds"],
        "most_host_bytes": used.ru_maxrss * 1024, "train_allocated_bytes": answer["phases"]["train"]["allocated_bytes"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    arguments = parser.parse_args()
    rows = [measure("gpt2", GPT2), measure("llama", LLAMA)]
    for row in rows:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
    write_result(target(arguments.json), {"scripts": rows}, packages=("transformers",))


if __name__ == "__main__":
    main()
