"""torchtitan's own trainer on the virtual card: python -m bench.titan_trainer [--json F] [--reach]

Needs torchtitan 0.3 (pip install 'memfit[titan]'). Predicts Llama 3.1 8B as ``memfit predict torchtitan:llama3_8b``
does, beside what torchtitan and torchao published for older versions, eager and compiled. ``--reach`` prints instead
which of its models and kinds of parallelism can be traced beside the installed torch, and what stops the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from bench.result_file import ROOT, add_json_option, target, write_result

GIB = 2**30
PUBLISHED = {
    "the loss in one piece": 82.4,
    "the loss in one piece, blocks compiled, 128 ranks": 62.0,
    "the loss in one piece, blocks and loss compiled, batch 1": 30.89,
}
"""GiB reserved, of bench/titan.toml: an H100 of 96 GB, FSDP. The first two are of torchtitan 9dec370 (December 2024),
which compiled no loss (pytorch/torchtitan pull request 755); the last is of 775a486 (June 2025), which did."""
DTENSOR = "--set parallelism.spmd_backend=full_dtensor"
EXPANDABLE = "--set PYTORCH_ALLOC_CONF=expandable_segments:True"
"""As torchtitan's run_train.sh sets it."""
LLAMA = f"torchtitan:llama3_8b --device h100 --memory 95GiB {DTENSOR} {EXPANDABLE}"
WHOLE = f"{LLAMA} --set loss.num_chunks=1"
BLOCKS = "--set compile.enable=true --set compile.components=model"
STEPS = {
    "as configured": f"{LLAMA} --micro-batch 2 --world 8",
    "as configured, compiled": f"{LLAMA} --micro-batch 2 --world 8 --set compile.enable=true",
    "the loss in one piece": f"{WHOLE} --micro-batch 2 --world 8",
    "the loss in one piece, 128 ranks": f"{WHOLE} --micro-batch 2 --world 128",
    "the loss in one piece, blocks compiled": f"{WHOLE} --micro-batch 2 --world 8 {BLOCKS}",
    "the loss in one piece, blocks compiled, 128 ranks": f"{WHOLE} --micro-batch 2 --world 128 {BLOCKS}",
    "the loss in one piece, blocks and loss compiled, batch 1": f"{WHOLE} --micro-batch 1 --world 8 "
    "--set compile.enable=true",
}
WITHOUT_GRAPHS = "--set training.disable_cuda_graphs=true"
SMALL = "--device h100 --micro-batch 2 --set training.seq_len=512"
REACHED = {
    "llama3": f"torchtitan:llama3_debugmodel {SMALL} --world 2 {DTENSOR}",
    "llama3, one rank": f"torchtitan:llama3_debugmodel {SMALL}",
    "llama3, spmd_types": f"torchtitan:llama3_debugmodel {SMALL} --world 2",
    "llama3, partial_dtensor": f"torchtitan:llama3_debugmodel {SMALL} --world 2 "
    "--set parallelism.spmd_backend=partial_dtensor",
    "llama3, HSDP": f"torchtitan:llama3_debugmodel {SMALL} --mesh dp_replicate=2,dp_shard=2 {DTENSOR}",
    "llama3, TP": f"torchtitan:llama3_debugmodel {SMALL} --mesh dp_shard=2,tp=2 {DTENSOR}",
    "llama3, CP": f"torchtitan:llama3_debugmodel {SMALL} --mesh dp_shard=2,cp=2 {DTENSOR}",
    "llama3, PP": f"torchtitan:llama3_debugmodel {SMALL} --mesh pp=2,dp_shard=2 {DTENSOR} {WITHOUT_GRAPHS}",
    "llama3, varlen attention": f"torchtitan:llama3_debugmodel_varlen_attn {SMALL} --world 2 {DTENSOR}",
    "llama3, compiled": f"torchtitan:llama3_debugmodel {SMALL} --world 2 {DTENSOR} --set compile.enable=true",
    "qwen3": f"torchtitan:qwen3_debugmodel {SMALL} --world 2 {DTENSOR}",
    "qwen3, experts": f"torchtitan:qwen3_moe_debug {SMALL} --world 2 {DTENSOR}",
    "deepseek_v3": f"torchtitan:deepseek_v3_debugmodel {SMALL} --world 2 {DTENSOR}",
    "deepseek_v3, EP": f"torchtitan:deepseek_v3_debugmodel {SMALL} --world 2 {DTENSOR} "
    f"{WITHOUT_GRAPHS} --set parallelism.expert_parallel_degree=2",
    "gpt_oss": f"torchtitan:gpt_oss_debugmodel_flex {SMALL} --world 2 {DTENSOR}",
    "muse_glimmer": f"torchtitan:muse_glimmer_debugmodel {SMALL} --world 2 {DTENSOR}",
    "kimi_k2_7": f"torchtitan:kimi_k2_5_debugmodel {SMALL} --world 2 {DTENSOR}",
    "qwen3_5": f"torchtitan:qwen35_debugmodel {SMALL} --world 2 {DTENSOR}",
    "flux": "torchtitan:flux_debugmodel --device h100 --micro-batch 2 --world 2 "
    "--set parallelism.spmd_backend=partial_dtensor",
}
"""One configuration of each model, and one of each kind of parallelism of one model."""
SHOWN = ("allocated_bytes", "reserved_bytes", "process_bytes")


def main() -> int:
    """0; a configuration that is not traced is a figure and no failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reach", action="store_true", help="one configuration of each model and parallelism")
    add_json_option(parser)
    asked = parser.parse_args()
    steps = {name: row(words) for name, words in (REACHED if asked.reach else STEPS).items()}
    figures = {"published": PUBLISHED, "steps": steps}
    print(json.dumps(figures, indent=1))
    write_result(target(asked.json, complete=not asked.reach), figures, packages=("torchtitan",))
    return 0


def row(words: str) -> dict[str, Any]:
    """A prediction, or the line that says why there is none."""
    command = [sys.executable, "-m", "memfit", "predict", *words.split(), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    known = {"command": f"memfit predict {words}", "exit_code": done.returncode}
    if done.returncode not in (0, 3):
        lines = [line for line in done.stderr.splitlines() if line.startswith("memfit: ")]
        return {**known, "why": (lines or ["memfit: no line"])[-1].removeprefix("memfit: ")}
    answer = json.loads(done.stdout)
    phase = answer["phases"]["train"]
    return {
        **known, **{name: phase[name] for name in SHOWN}, "categories": phase["categories"], "mesh": answer["mesh"],
        "parameters": answer["nets"][0]["parameters"], "assumed": answer["assumed"],
        "not_validated": answer["not_validated"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
