"""Messages of every allocator and version, and what follows from each.

pytest tests/explain/test_messages.py
"""

import pytest
import torch

from memfit.explain.diagnosis import explain
from memfit.explain.evidence import Evidence
from memfit.explain.log import read_log
from tests.explain import samples
from tests.explain.samples import GIB, MIB


def read(text: str) -> Evidence:
    evidence = read_log(text)
    assert evidence is not None
    return evidence


def test_torch_1_10() -> None:
    failure = read(samples.TORCH_1_10).failures[0]
    assert (failure.requested, failure.device) == (20 * MIB, 0)
    assert failure.free == round(11.69 * MIB)
    assert failure.capacity == round(23.69 * GIB)
    assert failure.allocated == round(21.56 * GIB)
    assert failure.reserved == pytest.approx(21.80 * GIB, abs=MIB)
    assert explain(read(samples.TORCH_1_10)).cause == "fragmentation", "0.24 GiB is reserved and free"


def test_torch_1_12_with_a_limit() -> None:
    failure = read(samples.TORCH_1_12).failures[0]
    assert failure.allowed == 12 * GIB
    assert failure.short == pytest.approx(1.5 * GIB - 0.1 * GIB, abs=MIB), "the limit leaves 0.1 GiB"


def test_torch_2_0_with_other_processes() -> None:
    explanation = explain(read(samples.TORCH_2_0))
    failure = explanation.evidence.failures[0]
    assert failure.others == ((1234, 10 * GIB), (77, 2 * GIB))
    assert failure.capacity == round(23.64 * GIB)
    assert explanation.cause == "other_processes"
    assert explanation.changes[0].write == "kill 1234 77"
    assert explanation.changes[0].saves_bytes == 12 * GIB


@pytest.mark.parametrize(("text", "allocator"), [(samples.TORCH_2_14, "cuda"), (samples.HIP, "hip")])
def test_torch_2_14_and_hip(text: str, allocator: str) -> None:
    explanation = explain(read(text))
    failure = explanation.evidence.failures[0]
    assert failure.allocator == allocator
    assert (failure.requested, failure.free, failure.private_pools) == (2 * GIB, 1.5 * GIB, 3 * GIB)
    assert failure.outside == pytest.approx(1.1 * GIB, abs=MIB)
    assert failure.short == 0.5 * GIB
    assert explanation.cause == "fragmentation"
    assert [change.name for change in explanation.changes if change.helps == "no"] == ["torch.cuda.empty_cache()"]


def test_a_message_that_is_wrapped_over_lines() -> None:
    words = samples.TORCH_2_14.split()
    wrapped = "\n".join(" ".join(words[at : at + 7]) for at in range(0, len(words), 7))
    assert read(wrapped).failures[0].free == 1.5 * GIB


def test_mps() -> None:
    failure = read(samples.MPS).failures[0]
    assert (failure.allocator, failure.requested) == ("mps", 256 * MIB)
    assert failure.short == pytest.approx(256 * MIB - (9.07 - 8.90) * GIB + 9 * MIB, abs=MIB)


@pytest.mark.parametrize(("text", "requested"), [(samples.CPU, 400_000_000_000), (samples.WINDOWS, MIB)])
def test_cpu(text: str, requested: int) -> None:
    explanation = explain(read(text))
    assert explanation.evidence.failures[0].requested == requested
    assert explanation.cause == "host"


def test_the_message_of_the_installed_torch() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert read(str(caught.value)).failures[0].requested == 1 << 50


@pytest.mark.parametrize(
    "text",
    [
        samples.KERNEL, "Killed", "srun: error: Detected 1 oom_kill event in StepId=1.0", "exit code 137",
        "train.sh: line 3:  4242 Killed                  python train.py",
        "  exitcode  : -9 (pid: 4242)", "Last State: Terminated  Reason: OOMKilled  Exit Code: 137",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    ],
)  # fmt: skip
def test_a_process_that_the_system_ended(text: str) -> None:
    explanation = explain(read(text))
    assert explanation.cause == "host"
    assert not any("expandable" in change.name for change in explanation.changes)


def test_the_kernel_says_what_the_process_held() -> None:
    assert "when it held 1.00 GiB" in explain(read(samples.KERNEL)).verdict


def test_shared_memory_of_a_loader() -> None:
    text = (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm)."
    )
    text += (
        "\nRuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's "
    )
    text += "workers are out of shared memory. Please try to raise your shared memory limit."
    for said in (text, text.splitlines()[0]):
        assert explain(read(said)).cause == "shared_memory"
    explanation = explain(read(text))
    assert "--shm-size" in explanation.changes[0].write


@pytest.mark.parametrize(
    "text",
    ["RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
     "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
     "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"],
)  # fmt: skip
def test_a_library_that_found_no_memory(text: str) -> None:
    assert read(text).failures[0].allocator == "library"


@pytest.mark.parametrize("text", ["hello", "step 3 loss 2.0", "ValueError: out of range", "memory is cheap", "{}"])
def test_text_without_a_failure(text: str) -> None:
    assert read_log(text) is None
