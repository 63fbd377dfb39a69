"""Messages as allocators and kernels of several versions write them, and a snapshot as torch on a card writes one."""

from __future__ import annotations

from typing import Any

MIB = 1 << 20
GIB = 1 << 30

TORCH_1_10 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.69 GiB total capacity; 21.56 GiB already "
    "allocated; 11.69 MiB free; 21.80 GiB reserved in total by PyTorch)"
)
TORCH_1_12 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 1; 15.78 GiB total capacity; 10.01 GiB already "
    "allocated; 200.00 MiB free; 12.00 GiB allowed; 11.90 GiB reserved in total by PyTorch) If reserved memory is >> "
    "allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management "
    "and PYTORCH_CUDA_ALLOC_CONF"
)
TORCH_2_0 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacty of 23.64 "
    "GiB of which 1.00 GiB is free. Process 1234 has 10.00 GiB memory in use. Process 77 has 2.00 GiB memory in use. "
    "Of the allocated memory 9.00 GiB is allocated by PyTorch, and 500.00 MiB is reserved by PyTorch but unallocated."
)
TORCH_2_14 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of 79.11 GiB "
    "of which 1.50 GiB is free. Including non-PyTorch memory, this process has 77.60 GiB memory in use. Of the "
    "allocated memory 70.00 GiB is allocated by PyTorch, with 3.00 GiB allocated in private pools (e.g., CUDA Graphs), "
    "and 6.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
HIP = TORCH_2_14.replace("CUDA out", "HIP out").replace("PYTORCH_ALLOC", "PYTORCH_HIP_ALLOC")
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 8.90 GB, other allocations: 9.00 MB, max allowed: 9.07 "
    "GB). Tried to allocate 256.00 MB on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit"
)
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)"
)
WINDOWS = "RuntimeError: [enforce fail at ..\\c10\\core\\impl\\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1048576 bytes."  # noqa: E501
KERNEL = (
    "[12345.6] Out of memory: Killed process 4242 (python) total-vm:99999kB, anon-rss:1048576kB, file-rss:0kB, "
    "shmem-rss:0kB, UID:1000"
)
TRACEBACK = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 88, in <module>
    main()
  File "/home/u/train.py", line 61, in main
    loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/opt/lib/python3.11/site-packages/torch/nn/functional.py", line 3462, in cross_entropy
    return torch._C._nn.cross_entropy_loss(
"""


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


LEAK = [frame("/sp/site-packages/torch/nn/functional.py", 9, "linear"), frame("/home/u/train.py", 30, "log")]
STEP = [
    frame("/sp/site-packages/torch/nn/modules/module.py", 1775, "_call_impl"),
    frame("/home/u/net.py", 12, "forward"),
]
ADAM = [frame("/sp/site-packages/torch/optim/adam.py", 210, "_init_group"), frame("/home/u/train.py", 33, "main")]


def leaking_snapshot(steps: int = 40, *, leaks: bool = True) -> dict[str, Any]:
    """As torch writes one: every step allocates and frees 20 blocks; with a leak, one more stays."""
    entries: list[dict[str, Any]] = []
    live: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    address = 1 << 40

    def allocate(size: int, frames: list[dict[str, Any]]) -> int:
        nonlocal address
        address += size
        live[address] = (size, frames)
        entries.append({"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": frames})
        return address

    def free(where: int) -> None:
        size, frames = live.pop(where)
        for action in ("free_requested", "free_completed"):
            entries.append({"action": action, "addr": where, "size": size, "stream": 0, "frames": frames})

    allocate(64 * MIB, ADAM)
    for _ in range(steps):
        made = [allocate(10 * MIB, STEP) for _ in range(20)]
        if leaks:
            allocate(8 * MIB, LEAK)
        for where in made:
            free(where)
    entries.append({"action": "oom", "size": 512 * MIB, "device_free": 100 * MIB, "stream": 0, "frames": STEP})
    blocks = [
        {"address": at, "size": size, "requested_size": size - 100, "state": "active_allocated", "frames": frames}
        for at, (size, frames) in live.items()
    ]
    blocks.append({"address": 1, "size": 60 * MIB, "requested_size": 0, "state": "inactive", "frames": []})
    free_segment = {"address": 2, "size": 30 * MIB, "requested_size": 0, "state": "inactive", "frames": []}
    return {
        "segments": [
            {"device": 0, "total_size": sum(b["size"] for b in blocks), "is_expandable": False, "blocks": blocks},
            {"device": 0, "total_size": 30 * MIB, "is_expandable": False, "blocks": [free_segment]},
        ],
        "device_traces": [entries],
    }


NVIDIA_SMI = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|=========================================+========================+======================|
|   0  NVIDIA GeForce RTX 4090        Off |   00000000:01:00.0  On |                  Off |
| 30%   45C    P2            100W /  450W |   22000MiB /  24564MiB |     97%      Default |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA GeForce RTX 4090        Off |   00000000:02:00.0 Off |                  Off |
| 30%   30C    P8             20W /  450W |     300MiB /  24564MiB |      0%      Default |
+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |
|=========================================================================================|
|    0   N/A  N/A      1234      C   python                                      12000MiB |
|    0   N/A  N/A      9999      C   /opt/other/bin/python3                       9500MiB |
+-----------------------------------------------------------------------------------------+
"""
NVIDIA_SMI_418 = """\
Mon May  1 10:00:00 2019
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 418.67       Driver Version: 418.67       CUDA Version: 10.1     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|===============================+======================+======================|
|   0  Tesla V100-SXM2...  On   | 00000000:00:1E.0 Off |                    0 |
| N/A   40C    P0    60W / 300W |  15500MiB / 16130MiB |     97%      Default |
+-------------------------------+----------------------+----------------------+
|   1  GeForce RTX 208...  Off  | 00000000:02:00.0  On |                  N/A |
| 35%   50C    P2   100W / 250W |   3000MiB / 11019MiB |     10%      Default |
+-------------------------------+----------------------+----------------------+
+-----------------------------------------------------------------------------+
| Processes:                                                       GPU Memory |
|  GPU       PID   Type   Process name                             Usage      |
|=============================================================================|
|    0      1234      C   python                                     8000MiB |
|    0      4321      C   .../envs/x/bin/python3                     7400MiB |
|    1      1000      G   /usr/lib/xorg/Xorg                           40MiB |
+-----------------------------------------------------------------------------+
"""
NVIDIA_SMI_525 = """\
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 525.85.12    Driver Version: 525.85.12    CUDA Version: 12.0     |
|-------------------------------+----------------------+----------------------+
|   0  NVIDIA A100-SXM...  On   | 00000000:07:00.0 Off |                    0 |
| N/A   40C    P0    60W / 400W |  79000MiB / 81920MiB |     97%      Default |
|                               |                      |             Disabled |
+-------------------------------+----------------------+----------------------+
| Processes:                                                                  |
|  GPU   GI   CI        PID   Type   Process name                  GPU Memory |
|        ID   ID                                                   Usage      |
|=============================================================================|
|    0   N/A  N/A      1234      C   python                          40000MiB |
|    0   N/A  N/A      1235    C+G   ...cal\\Programs\\My App\\a.exe    N/A      |
|    0   N/A  N/A      1236      C   [Not Found]                     38000MiB |
+-----------------------------------------------------------------------------+
"""
NVIDIA_SMI_MIG = """\
| NVIDIA-SMI 535.54.03              Driver Version: 535.54.03    CUDA Version: 12.2     |
|   0  NVIDIA A100-SXM4-80GB          On  | 00000000:07:00.0 Off |                   On |
| N/A   40C    P0              60W / 400W |  9900MiB / 81920MiB |     N/A      Default |
|                                         |                      |              Enabled |
+---------------------------------------------------------------------------------------+
| MIG devices:                                                                          |
+------------------+--------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |                   Memory-Usage |        Vol|      Shared           |
|      ID  ID  Dev |                     BAR1-Usage | SM     Unc| CE ENC DEC OFA JPG    |
|==================+================================+===========+=======================|
|  0    1   0   0  |            9856MiB / 40192MiB  | 42      0 |  3   0    2    0    0 |
|                  |               2MiB / 65535MiB  |           |                       |
+------------------+--------------------------------+-----------+-----------------------+
|  0    2   0   1  |              37MiB / 40192MiB  | 42      0 |  3   0    2    0    0 |
+------------------+--------------------------------+-----------+-----------------------+
| Processes:                                                                            |
|    0    1    0       1234      C   python                                     9800MiB |
"""
NVIDIA_SMI_Q = """\
==============NVSMI LOG==============
Timestamp                                 : Mon May  1 10:00:00 2023
Driver Version                            : 535.54.03
CUDA Version                              : 12.2
Attached GPUs                             : 2
GPU 00000000:07:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    Minor Number                          : 0
    FB Memory Usage
        Total                             : 81920 MiB
        Reserved                          : 600 MiB
        Used                              : 79000 MiB
        Free                              : 2320 MiB
    BAR1 Memory Usage
        Total                             : 131072 MiB
        Used                              : 1 MiB
    Processes
        GPU instance ID                   : N/A
        Process ID                        : 1234
            Type                          : C
            Name                          : python
            Used GPU Memory               : 40000 MiB
        Process ID                        : 1235
            Type                          : C
            Name                          : python
            Used GPU Memory               : 38000 MiB
GPU 00000000:0A:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    FB Memory Usage
        Total                             : 81920 MiB
        Used                              : 10 MiB
    Processes                             : None
"""
