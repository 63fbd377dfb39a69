"""pytest tests/device/test_process_limits.py: ranks that a machine does not hold are refused before one is started."""

import subprocess

import pytest

from memfit.cli import main
from memfit.device.hardware import process_limits
from memfit.device.hardware.process_limits import check_cards, check_fake_ranks, check_ranks, check_windows, rank_limit
from memfit.errors import InputError
from memfit.plan import Plan, write_plan

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch):
    """A machine with 2 cores and 8 GiB free."""
    monkeypatch.setattr(process_limits, "available_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(process_limits, "available_cores", lambda: 2)


@pytest.mark.parametrize(
    ("each", "once", "ranks"), [(GIB, 0, 7), (GIB, 4 * GIB, 3), (GIB >> 4, 0, 16), (9 * GIB, 0, 0)]
)
def test_memory_and_cores_bound_the_ranks(machine, each, once, ranks):
    assert rank_limit(each, bytes_once=once).ranks == ranks


def test_more_cores_hold_more_ranks(machine, monkeypatch):
    monkeypatch.setattr(process_limits, "available_cores", lambda: 4)
    assert rank_limit(1).ranks == 32


def test_the_largest_number_that_fits_passes_and_one_more_is_refused(machine):
    check_ranks("--world-sizes 7", 7, GIB)
    with pytest.raises(
        InputError, match=r"^--world-sizes 8: 8 ranks do not fit .* at most 7 do: .*; write 7 or fewer$"
    ):
        check_ranks("--world-sizes 8", 8, GIB)


def test_one_rank_is_never_refused_for_its_size(machine):
    check_ranks("--world-sizes 1", 1, 100 * GIB)


def test_simulated_ranks_are_bounded_by_memory_too(machine, monkeypatch):
    check_fake_ranks("--world 16384", 16384)
    with pytest.raises(InputError, match="at most 16384 ranks"):
        check_fake_ranks("--world 16385", 16385)
    monkeypatch.setattr(process_limits, "available_bytes", lambda: GIB >> 4)
    with pytest.raises(InputError, match="at most 921 ranks"):
        check_fake_ranks("--world 922", 922)


def test_windows_whose_states_fill_the_memory_are_refused(machine):
    check_windows(7, GIB >> 2)
    with pytest.raises(InputError, match=r"^--windows 8: memfit keeps about 1.00 GiB of each .*; write 7 or fewer$"):
        check_windows(8, GIB >> 2)
    check_windows(1, 100 * GIB)


def test_a_control_group_bounds_the_memory(tmp_path):
    inner = tmp_path / "service" / "job"
    inner.mkdir(parents=True)
    for folder, limit in ((tmp_path / "service", "5000"), (inner, "max")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("4000\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 300\n")
    left = process_limits._left(tmp_path, "/service/job", "memory.max", "memory.current", "inactive_file")
    assert left == [1300]


def test_a_plan_for_more_cards_than_there_are_is_refused():
    check_cards("plan for 2 devices", 2, "cpu")
    with pytest.raises(InputError, match="CUDA device"):
        check_cards("plan for 99 devices", 99, "rtx4090")


@pytest.mark.parametrize(
    "arguments",
    [
        "verify gpt_sovits/tiny --world-sizes 1,9999",
        "verify gpt_sovits/tiny --world-sizes 9999 --engine zero2",
        "audit tests/audit/targets.py:gathers --world-sizes 99999",
        "audit tests/audit/targets.py:gathers --world-sizes 9999 --real",
        "predict gpt_sovits/tiny --engine ddp --world 99999 --device h100",
        "plan gpt_sovits/tiny --global-batch 99999 --devices 99999 --device h100",
        "compare gpt_sovits/tiny --engine ddp --world 99999 --device h100",
        "ui gpt_sovits/tiny --devices 99999 --device h100",
        "trace --world 99999 -- python examples/scripts/gpt2.py",
        "trace -- torchrun --nnodes 999 --nproc-per-node 999 examples/scripts/gpt2.py",
    ],
)
def test_no_verb_starts_a_process_for_ranks_that_do_not_fit(arguments, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail("a process was started"))
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert said.count("\n") == 0
    assert "at most" in said


def test_run_refuses_a_plan_for_more_ranks_than_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail("a process was started"))
    plan = Plan(
        job="gpt_sovits/tiny", settings={}, device="cpu", budget_bytes=GIB, unit="samples", global_batch=9999,
        micro_batch=1, micro_batches=[[1]] * 9999, arithmetic="", engine="ddp", precision="fp32", seed=0,
    )  # fmt: skip
    write_plan(plan, tmp_path / "plan.toml")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert "9999 ranks do not fit" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/box/inner", {"box/cpu.max": "150000 100000", "box/inner/cpu.max": "max 100000"}, [1]),
        ("0::/", {"cpu.max": "400000 100000"}, [4]),
        ("4:cpu,cpuacct:/box", {"cpu/box/cpu.cfs_quota_us": "50000", "cpu/box/cpu.cfs_period_us": "100000"}, [0]),
        ("4:cpu,cpuacct:/box", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, []),
        ("7:memory:/box", {"box/cpu.max": "100000 100000"}, []),
    ],
)
def test_a_container_has_the_cores_that_its_quota_gives_it_the_time_of(tmp_path, line, files, expected):
    (tmp_path / "cgroup").write_text(line + "\n")
    for name, content in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(content + "\n")
    assert process_limits.cores_of_groups(tmp_path / "cgroup", tmp_path / "root") == expected


def test_a_quota_of_less_than_a_core_leaves_one(monkeypatch):
    monkeypatch.setattr(process_limits, "cores_of_groups", lambda: [0, 3])
    assert process_limits.available_cores() == 1
