"""A plan of somebody else: its texts become no shell command, and its report need not run its job.

python -m pytest tests/attack/test_hostile_plans.py
"""

import os
import subprocess
from dataclasses import replace

import pytest
import yaml

from memfit.cli import main
from memfit.job import Job
from memfit.plan import read_plan
from memfit.show.export import export

HOSTILE = [
    "x\ntouch MARK",
    "x\rtouch MARK",
    "'; touch MARK; '",
    '"; touch MARK; "',
    "$(touch MARK)",
    "`touch MARK`",
    "x\u2028touch MARK",
    "x\x85touch MARK",
    "\\\ntouch MARK",
    "x && touch MARK #",
]


class Plain(Job):
    def nets(self):
        return {}

    def optimizers(self, nets):
        return {}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "job.py").write_text(JOB.format(mark=folder / "ran"))
    with pytest.raises(SystemExit) as ended:
        main(["plan", f"{folder}/job.py:Net", "--global-batch", "4", "--memory", "1GiB", "--out", f"{folder}/p.toml"])
    assert ended.value.code == 0
    (folder / "ran").unlink()
    return folder / "p.toml"


JOB = """
import torch
from pathlib import Path
import memfit

Path({mark!r}).touch()

class Net(memfit.Job):
    def nets(self):
        return {{"net": torch.nn.Linear(4, 4)}}
    def optimizers(self, nets):
        return {{"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}}
    def batch(self, shape):
        return torch.zeros(shape.items, 4)
    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), len(batch)
""".replace("{mark!r}", "'{mark}'")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_plan_is_a_command_in_the_exported_script(plan, text, tmp_path):
    hostile = replace(
        read_plan(plan), job=text, arithmetic=text, engine=text, precision=text, unit=text, implementation=text,
        checkpointing={text: "full"}, engine_choices={text: text, "schedule": text},
    )  # fmt: skip
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > arguments\n')
    (folder / "torchrun").chmod(0o755)
    exported = export(hostile, Plain(), {}, "torchrun", text, f"{text}.toml")
    (tmp_path / "run.sh").write_text(exported.text)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["sh", "run.sh"], cwd=tmp_path, env=environment, check=True, timeout=20)
    assert "--standalone" in (tmp_path / "arguments").read_text()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["arguments", "run.sh", "tools"]
    stages = replace(hostile, engine="fsdp2", precision="bf16", mesh={"pp": 2})
    (tmp_path / "run.sh").write_text(export(stages, Plain(), {}, "torchtitan", text, "p.toml").text)
    subprocess.run(["sh", "run.sh"], cwd=tmp_path, env=environment, check=True, timeout=20)
    assert "torchtitan.train" in (tmp_path / "arguments").read_text()
    for to in ("accelerate", "deepspeed"):
        command = export(replace(hostile, precision="bf16"), Plain(), {}, to, text, "p.toml").command
        script = f"deepspeed() {{ :; }}; accelerate() {{ :; }}; {command}"
        subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, check=False, timeout=20)
    (folder / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > tools/srun.said\nexec "$@"\n')
    (folder / "scontrol").write_text("#!/bin/sh\necho host\n")
    (folder / "memfit").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > tools/memfit.said\n')
    for tool in ("srun", "scontrol", "memfit"):
        (folder / tool).chmod(0o755)
    task = yaml.safe_load(export(hostile, Plain(), {}, "skypilot", text, f"{text}.toml").text)
    assert sorted(task) == ["name", "num_nodes", "run", "setup", "workdir"]
    for script in (export(hostile, Plain(), {}, "slurm", text, f"{text}.toml").text, task["run"]):
        (tmp_path / "run.sh").write_text(script)
        numbered = {**environment, "SLURM_JOB_ID": "7"}
        subprocess.run(["sh", "run.sh"], cwd=tmp_path, env=numbered, check=True, timeout=20)
        assert f"{text}.toml" in (folder / "memfit.said").read_bytes().decode()
        (folder / "memfit.said").unlink()
    assert not (tmp_path / "MARK").exists()


def test_a_report_of_a_plan_runs_its_job_only_where_it_may(plan, capsys):
    ran = plan.parent / "ran"
    for option, runs in (["--no-trace"], False), ([], True):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(plan), *option])
        assert ended.value.code == 0
        assert ran.exists() is runs
    capsys.readouterr()


def test_a_name_that_is_not_utf_8_is_kept_in_a_script_and_refused_in_a_plan(plan, tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    for name in ("p.toml", "job.py"):
        (folder / name).write_bytes((plan.parent / name).read_bytes())
    for to in ("torchrun", "slurm"):
        with pytest.raises(SystemExit) as ended:
            main(["export", f"{folder}/p.toml", "--to", to, "--out", f"{tmp_path}/{to}.sh"])
        assert ended.value.code == 0
        assert b"\xff/p.toml" in (tmp_path / f"{to}.sh").read_bytes()
    options = ["--global-batch", "4", "--memory", "1GiB", "--out", f"{tmp_path}/new.toml"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", f"{folder}/job.py:Net", *options])
    assert ended.value.code == 2
    assert "rename that file or folder" in capsys.readouterr().err
    assert not (tmp_path / "new.toml").exists()
