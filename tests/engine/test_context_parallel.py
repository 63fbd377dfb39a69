"""Why context parallelism is refused: torch's own runs no attention of the CPU, in any of its kernels.

python -m pytest tests/engine/test_context_parallel.py -m slow
"""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
    parts = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    try:
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]), sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        said = "it runs"
    except (NotImplementedError, RuntimeError) as error:
        said = str(error)
    if dist.get_rank() == 0:
        print(backend.name, said.splitlines()[0])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_no_attention_of_the_cpu_runs_on_parts_of_a_sequence(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert len(said) == 3
    assert "does not have a sharding strategy registered" in said["FLASH_ATTENTION"]
    assert "No viable backend" in said["EFFICIENT_ATTENTION"]
    assert "mixed torch.Tensor and DTensor" in said["MATH"]
