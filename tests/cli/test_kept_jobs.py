"""What is kept of several jobs that one command asks: another process finds it.

python -m pytest tests/cli/test_kept_jobs.py
"""

from tests.cli.test_background_traces import asked

JOB = """
import os
import memfit, torch

os.environ["SET_BY_{name}"] = "1"
open("imported", "a").write("{name} ")

class {name}(memfit.Job):
    def nets(self):
        return {{"net": torch.nn.Linear(8, 8)}}
    def optimizers(self, nets):
        return {{"net": torch.optim.SGD(nets["net"].parameters())}}
    def batch(self, shape):
        return torch.zeros(shape.items, 8)
    def loss(self, nets, batch):
        return nets["net"](batch).sum(), len(batch)
"""


def test_variables_that_one_job_sets_do_not_name_what_is_kept_of_the_next(tmp_path):
    for name in ("First", "Second"):
        (tmp_path / f"{name.lower()}.py").write_text(JOB.format(name=name))
    question = ("compare", "first.py:First", "second.py:Second", "--device", "rtx4090")
    asked(tmp_path, *question)
    assert (tmp_path / "imported").read_text() == "First Second "
    asked(tmp_path, *question)
    assert (tmp_path / "imported").read_text() == "First Second "
