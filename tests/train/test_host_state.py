"""A run whose optimizer's state waits on the host learns what one with it on the device does, and goes on under either.

python -m pytest tests/train/test_host_state.py
"""

from dataclasses import replace

from memfit.plan import read_plan, write_plan
from testing.kill_and_resume import make_plan, new_run, server


def test_a_run_with_state_on_the_host_ends_as_one_without(tmp_path):
    plan = make_plan(tmp_path, "synchronous")
    with server() as server_process:
        undisturbed, run = new_run(tmp_path / "whole", plan), new_run(tmp_path / "run", plan)
        assert server_process.run(undisturbed, resume=False, windows=6)["code"] == 0
        host = replace(read_plan(plan), optimizer_state="host", average="host")
        write_plan(host, run / "plan.toml")
        assert server_process.run(run, resume=False, windows=2)["code"] == 0, (run / "log.txt").read_text()
        assert server_process.run(run, resume=True, windows=4)["code"] == 0, (run / "log.txt").read_text()
        write_plan(read_plan(plan), run / "plan.toml")
        assert server_process.run(run, resume=True, windows=6)["code"] == 0, (run / "log.txt").read_text()
    files = sorted(path.name for path in (undisturbed / "final").iterdir())
    assert files
    assert all((run / "final" / name).read_bytes() == (undisturbed / "final" / name).read_bytes() for name in files)
    assert (run / "samples.jsonl").read_text() == (undisturbed / "samples.jsonl").read_text()
