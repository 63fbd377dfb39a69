"""Logs: ranks' prefixes, tracebacks, steps, and memory that is printed with them.

pytest tests/explain/test_log.py
"""

import pytest

from memfit.explain.diagnosis import explain
from memfit.explain.log import read_log
from tests.explain.samples import KERNEL, MIB, TORCH_2_14, TRACEBACK


def prefixed(prefix: str, text: str) -> str:
    return "\n".join(prefix + line for line in text.splitlines()) + "\n"


@pytest.mark.parametrize(
    "prefix", ["[rank3]:", "[rank3]: ", "[default3]:", "3: ", "(rank 3) ", "[3]:", "[rank3]:[rank3]: "]
)
def test_the_rank_and_line_of_a_traceback_among_other_ranks_lines(prefix: str) -> None:
    other = prefix.replace("3", "0")
    own = prefixed(prefix, TRACEBACK + TORCH_2_14).splitlines()
    mixed = "\n".join(f"{line}\n{other}Traceback (most recent call last):" for line in own)
    evidence = read_log(mixed)
    assert evidence is not None
    (failure,) = evidence.failures
    assert failure.rank == 3
    assert str(failure.own_frame) == "/home/u/train.py:61 in main"
    assert failure.frames[-1].function == "cross_entropy"
    explanation = explain(evidence)
    assert explanation.verdict.startswith("Rank 3 ran out of memory in forward at /home/u/train.py:61")
    assert any(change.name == "cross entropy in chunks" for change in explanation.changes)


def test_the_first_rank_is_named_first_and_endings_of_others_are_left_out() -> None:
    text = "".join(prefixed(f"[rank{rank}]: ", TRACEBACK + TORCH_2_14) for rank in (5, 2))
    evidence = read_log(text + "  exitcode  : -9 (pid: 1)\n")
    assert evidence is not None
    assert [failure.rank for failure in evidence.failures] == [5, 2]
    assert dict(explain(evidence).facts)["ranks that failed"] == "2, 5; rank 5 first"


def test_a_kernel_line_counts_beside_a_torch_message() -> None:
    evidence = read_log(TORCH_2_14 + "\n" + KERNEL)
    assert evidence is not None
    assert [failure.allocator for failure in evidence.failures] == ["cuda"]


def grown(per_step: int) -> str:
    lines = [
        f"[{step}/100] step {step} | loss 2.1 | memory: {1000 + per_step * step} MiB | lr 1e-4" for step in range(30)
    ]
    return "\n".join(lines) + "\n" + TRACEBACK + TORCH_2_14


def test_memory_that_grows_with_the_steps_is_a_leak() -> None:
    evidence = read_log(grown(10))
    assert evidence is not None
    assert evidence.growth is not None
    assert evidence.growth.per_step == pytest.approx(10 * MIB, rel=0.05)
    assert evidence.failures[0].step == 29
    assert explain(evidence).cause == "leak"


def test_memory_that_stays_is_none() -> None:
    evidence = read_log(grown(0))
    assert evidence is not None
    assert evidence.growth is None
    explanation = explain(evidence)
    assert explanation.cause == "fragmentation"
    assert dict(explanation.facts)["over the steps"] == "no growth over 30 readings"


def test_one_long_sample() -> None:
    text = grown(0).replace("step 20 | loss 2.1 | memory: 1000", "step 20 | loss 2.1 | memory: 9000")
    evidence = read_log(text.replace("6.50 GiB is reserved", "0.10 GiB is reserved"))
    assert evidence is not None
    assert explain(evidence).cause == "long_sample"
    assert "step 20 needed 8.79 GiB" in explain(evidence).verdict


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        ('  File "t.py", line 5, in main\n    loss.backward()\n', "backward"),
        ('  File "t.py", line 5, in validate\n    out = model(x)\n', "validation"),
        ('  File "t.py", line 5, in main\n    optimizer.step()\n', "optimizer step"),
        ('  File "t.py", line 5, in main\n    model.cuda()\n', "loading"),
    ],
)
def test_the_part_of_training(frames: str, part: str) -> None:
    evidence = read_log("Traceback (most recent call last):\n" + frames + TORCH_2_14)
    assert evidence is not None
    assert f" in {part} at t.py:5" in explain(evidence).verdict


LEAKS = {
    "torchtitan": "[rank0]:[titan] 2025-03-01 10:00:00 - root - INFO - step: {n}  loss:  7.1  memory: {g:.2f}GiB(38%)  "
    "tps: 7,100",
    "DeepSpeed": "[INFO] [utils.py:782:see_memory_usage] Memory after step {n}\n"
    "[INFO] MA {g:.2f} GB         Max_MA {g:.2f} GB         CA 60 GB         Max_CA 60 GB\n"
    "[INFO] CPU Virtual Memory:  used = 45.0 GB, percent = 12.1%",
    "Megatron-LM": "[Rank 0] (after {n} iterations) memory (MB) | allocated: {m}.0 | max allocated: {m}.0",
    "detectron2": "[05/01 10:00:00 d2.utils.events]:  eta: 1:00:00  iter: {n}  total_loss: 1.2  max_mem: {m}M",
    "mmdetection": "mmdet - INFO - Epoch [1][{n}/7330]\tlr: 1e-3, eta: 1 day, time: 0.5, memory: {m}, loss: 1.2",
    "torchvision's references": "Epoch: [0]  [ {n}/200]  eta: 0:00:10  loss: 2.0  time: 0.1  max mem: {m}",
    "axolotl": "{{'loss': 2.3, 'memory/max_active (GiB)': {g:.3f}, 'memory/device_reserved (GiB)': 60.0, 'step': {n}}}",
    "torchtune": "Step {n} | loss:1.2 lr:0.0001 tokens_per_second_per_gpu:1200 peak_memory_alloc:{g:.3f}",
    "Composer": "[batch={n}/1000]:\n\t Train memory/current_allocated_mem: {g:.4f}\n\t Train loss: 2.1",
    "Ultralytics": "      {n}/100      {g:.3f}G      1.2      2.1      1.1         45   640: 100%|##| 100/100 [00:30]",
    "a unit in the name": "2024-05-01 INFO train: step={n} loss=2.0 gpu_mem_gb={g:.3f}",
    "a part of the card": "step {n} gpu mem: {g:.2f}/80GB util 50%",
    "bytes": "step {n} memory_allocated: {b}",
}


@pytest.mark.parametrize("logger", LEAKS)
def test_a_leak_in_the_words_of(logger: str) -> None:
    lines = [LEAKS[logger].format(n=n, g=10 + n / 4, m=10240 + n * 256, b=(10 << 30) + (n << 28)) for n in range(30)]
    evidence = read_log("\n".join(lines) + "\n" + TRACEBACK + TORCH_2_14)
    assert evidence is not None
    assert evidence.growth is not None
    assert evidence.growth.per_step == pytest.approx(256 * MIB, rel=0.05)
    assert evidence.readings == 30
    assert str(evidence.failures[0].own_frame) == "/home/u/train.py:61 in main"


@pytest.mark.parametrize(
    "line",
    ["step {n} max_mem: {rare}M", "epoch {n} mem_steps: 5 memory bank size 4096", "step {n} GPU memory: 45.2% mem 45 %",
     "step {n} mem 10.{saw}GB"],
    ids=["a maximum that seldom rises", "no memory", "percent", "a saw"],
)  # fmt: skip
def test_no_leak(line: str) -> None:
    lines = [line.format(n=n, rare=4000 + int(n**0.5) * 100, saw=10 + n % 80) for n in range(2000)]
    evidence = read_log("\n".join(lines) + "\n" + TRACEBACK + TORCH_2_14)
    assert evidence is not None
    assert evidence.growth is None


def test_steps_that_begin_again_in_each_epoch_are_readings() -> None:
    lines = [f"epoch {n // 20} step {n % 20} memory_allocated: {2_000_000_000 + n * 10_000_000}" for n in range(100)]
    evidence = read_log("\n".join(lines))
    assert evidence is not None
    assert evidence.growth is not None
    assert evidence.growth.unit == "reading"
    assert evidence.readings == 100


FRAMED = {
    "times": "".join(f"2024-05-01T10:00:0{i % 10}Z ERROR {line}\n" for i, line in enumerate(TRACEBACK.splitlines())),
    "containers": "".join(f"trainer-1  | {line}\n" for line in TRACEBACK.splitlines()),
    "an exception group": "".join(f"    | {line}\n" for line in TRACEBACK.splitlines()),
    "IPython": "OutOfMemoryError                          Traceback (most recent call last)\n"
    "Cell In[5], line 3\n      1 for x in loader:\n----> 3     loss = step(x)\n\n"
    "File /home/u/train.py:61, in main(x)\n     60 logits = net(x)\n"
    "---> 61     loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))\n\n"
    "File /opt/lib/python3.11/site-packages/torch/nn/functional.py:3462, in cross_entropy(input)\n"
    "-> 3462     return torch._C._nn.cross_entropy_loss(\n\n",
    "rich": "╭──── Traceback (most recent call last) ────╮\n│ /home/u/train.py:61 in main │\n│ │\n"
    "│ ❱ 61 │   loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1)) │\n╰────╯\n",
}


@pytest.mark.parametrize("framed", FRAMED)
def test_the_line_of_a_traceback_behind(framed: str) -> None:
    evidence = read_log(FRAMED[framed] + TORCH_2_14)
    assert evidence is not None
    own = evidence.failures[0].own_frame
    assert own is not None
    assert (own.file, own.line, own.function) == ("/home/u/train.py", 61, "main")
    assert own.text == "loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))"


def test_a_failure_after_which_the_run_went_on_comes_after_the_last() -> None:
    before, after = ("".join(f"step {n} loss 2.0\n" for n in numbers) for numbers in (range(50), range(50, 80)))
    survived = TORCH_2_14.replace("2.00 GiB", "512.00 MiB") + "; skipping batch\n"
    evidence = read_log(before + survived + after)
    assert evidence is not None
    assert explain(evidence).verdict.startswith("The process ran out of memory, and the run went on: it asked for 512")
    assert dict(explain(evidence).facts)["step"] == "49; the run went on to step 79"
    evidence = read_log(before + survived + after + TRACEBACK + TORCH_2_14)
    assert evidence is not None
    assert [failure.step for failure in evidence.failures] == [79, 49]


def test_the_line_where_the_end_of_a_worker_is_noticed_is_not_the_cause() -> None:
    evidence = read_log(TRACEBACK + "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. \n")
    assert evidence is not None
    assert explain(evidence).verdict.startswith("The process ran out of host memory: the system ended it")
