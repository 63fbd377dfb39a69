"""python -m pytest tests/bench/test_measure_gpu.py: what of it a machine without a card can show."""

from dataclasses import replace

import pytest
import torch

from bench import measure_gpu
from bench.accuracy_parts import gpu_overheads
from bench.accuracy_parts.further_sources import beside, measured
from bench.accuracy_parts.gpu_step import measure
from bench.accuracy_parts.measured import Measured, append_measured, read_measured
from memfit.errors import InputError

STEP = Measured(
    card="cpu", driver=None, torch="", job="f5_tts/tiny", settings={}, micro_batch=400, precision="fp32",
    checkpoint="none", memory_gib=None, ok=False, allocated_bytes=0, reserved_bytes=None, process_bytes=None,
    step_seconds=None,
)  # fmt: skip


def test_there_are_forty_configurations_of_every_kind_and_none_twice():
    steps = measure_gpu.configurations("h200", "1")
    assert len(steps) >= 40
    assert len({measure_gpu._key(step) for step in steps}) == len(steps)
    assert {step.precision for step in steps} == {"fp32", "bf16", "fp16"}
    assert {step.checkpoint for step in steps} == {"none", "all"}
    assert {"fused", "foreach"} <= {step.settings.get("implementation", "foreach") for step in steps}
    assert [step.micro_batch for step in measure_gpu.growing(steps[0])] == list(measure_gpu.SIZES)


def test_every_job_of_the_list_loads_with_its_settings():
    from memfit.loading import load_job

    for configuration in measure_gpu.configurations("h200", "1"):
        assert load_job(configuration.job, configuration.settings).settings()


def test_a_step_on_this_cpu_takes_what_is_predicted(tmp_path):
    path = tmp_path / "measured" / "cpu.jsonl"
    for checkpoint in ("none", "all"):
        append_measured(path, measure(replace(STEP, checkpoint=checkpoint), windows=3))
    rows = list(read_measured(path))
    assert [row.ok for row in rows] == [True, True]
    assert all(row.step_seconds > 0 and row.torch for row in rows)
    assert rows[1].allocated_bytes < rows[0].allocated_bytes

    import rich.console

    result = measured(path.parent, rich.console.Console(quiet=True))
    assert [abs(item["allocated_error"]) < 0.02 for item in result] == [True, True]
    assert beside(rows[0])["reserved_error"] is None


def test_what_is_in_the_file_is_not_run_again_and_sizes_grow_until_memory_is_short(tmp_path, monkeypatch):
    """The process that would need a card is replaced: it runs out of memory at 64."""
    ran = []

    def pretend(item):
        ran.append(item.micro_batch)
        return replace(item, ok=item.micro_batch < 64, allocated_bytes=item.micro_batch)

    monkeypatch.setattr(measure_gpu, "in_a_process", pretend)
    wanted = [replace(STEP, job="gpt_sovits/s1", micro_batch=1)]
    path = tmp_path / "card.jsonl"
    measure_gpu.measure_all(wanted, path, memory=0, until=float("inf"))
    assert ran == [1, 4, 16, 64]
    measure_gpu.measure_all(wanted, path, memory=0, until=float("inf"))
    assert ran == [1, 4, 16, 64]
    measure_gpu.measure_all(wanted, path, memory=30 << 30, until=float("inf"))
    assert ran == [1, 4, 16, 64] * 2  # the whole card is done; with 24 GiB it is not
    assert {row.memory_gib for row in read_measured(path)} == {None, 24.0}


def test_a_line_that_is_no_measurement_is_refused(tmp_path):
    path = tmp_path / "card.jsonl"
    path.write_text('{"card": "h200"}\n')
    with pytest.raises(InputError, match=r"card\.jsonl, line 1"):
        list(read_measured(path))


def test_without_a_card_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["measure_gpu.py"])
    if measure_gpu.used_bytes():
        pytest.skip("there is a card here")
    assert measure_gpu.main() == 2
    assert "no CUDA card" in capsys.readouterr().out


def test_overheads_are_what_each_stage_adds_and_a_stage_that_fails_says_why():
    used = [100]

    def load(nbytes):
        used[0] += nbytes

    def fail():
        raise RuntimeError("no bf16 here\nand more")

    measured = gpu_overheads.measure(
        {"context": lambda: load(50), "bf16": fail, "nccl": lambda: load(7)}, lambda: used[0]
    )  # fmt: skip
    assert measured == {"context": 50, "bf16": "RuntimeError: no bf16 here", "nccl": 7}


def test_every_stage_but_the_communicator_runs_on_this_cpu_too():
    measured = gpu_overheads.measure(gpu_overheads.stages(torch.device("cpu")), lambda: 0)
    assert set(measured.values()) == {0}
    assert {"products fp16", "convolutions bf16", "attention fp32", "optimizer"} <= measured.keys()


def test_overheads_are_measured_once(tmp_path, monkeypatch):
    path = tmp_path / "t4.overheads.json"
    path.write_text("{}")
    monkeypatch.setattr(measure_gpu.subprocess, "run", None)
    measure_gpu.measure_overheads(path, "t4", "1")
