"""A run validates on real samples, or not at all and says so."""

import pytest
import torch

from memfit.errors import InputError
from memfit.train.launch.validation_worker import main
from memfit.train.loop.validation_data import mean_of, metrics_of, validation_data
from testing.faulty_jobs import Plain, run


class Held(Plain):
    """Seven held-out samples."""

    real_validation_batch = False
    seen = ()

    def validation_dataset(self):
        return [(torch.full((6,), float(number)), torch.tensor(0.0)) for number in range(7)]

    def validate(self, nets, batch):
        type(self).seen = (*self.seen, batch[0][:, 0].tolist())
        return {"mean": batch[0].mean()}


def test_every_held_out_sample_is_validated_on_once_and_the_metric_is_their_mean(tmp_path):
    Held.seen = ()
    _, _, _, metrics, _ = run(tmp_path / "run", Held(), 3)
    assert [line["validation"] for line in metrics] == [{"mean": pytest.approx(3.0)}] * 3
    assert Held.seen == ([0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0]) * 3


class MadeUp(Plain):
    real_validation_batch = False


def test_a_job_with_made_up_batches_alone_is_not_validated(tmp_path):
    assert validation_data(MadeUp()) is None
    _, _, _, metrics, points = run(tmp_path / "run", MadeUp(), 3, proves=True)
    assert not any("validation" in line for line in metrics)
    assert "validate" not in points.reached


@pytest.mark.parametrize(("samples", "words"), [([], "gave no sample"), (7, "gave int, not a sequence")])
def test_samples_that_are_none_are_refused(samples, words):
    class Wrong(MadeUp):
        def validation_dataset(self):
            return samples

    with pytest.raises(InputError, match=words):
        validation_data(Wrong())


def test_means_of_numbers_lists_and_what_is_not_known():
    assert mean_of([({"a": 1.0, "b": [1, 2]}, 3), ({"a": 5.0, "b": [5, 2]}, 1)]) == {"a": 2.0, "b": [2.0, 2.0]}
    assert mean_of([({"a": None}, 3), ({"a": 5.0}, 1)]) == {"a": None}


ODD = ["x", "3", None, 1 + 2j, 10**400, torch.ones(3), {"b": 1.0}, [1.0], torch.ones(2, device="meta"), b"1", object]


@pytest.mark.parametrize("value", ODD)
def test_a_metric_that_is_no_number_is_a_mistake_of_the_job(tmp_path, value):
    class Odd(Held):
        def validate(self, nets, batch):
            return {"size": 1.0, "wrong": value}

    with pytest.raises(InputError, match=r"Odd\.validate\(\): 'wrong'"):
        run(tmp_path / "run", Odd(), 3, proves=True)


def test_names_of_metrics_become_text_and_several_numbers_become_lists(tmp_path):
    class Named(Held):
        def validate(self, nets, batch):
            return {("a", 1): torch.tensor(2), 3: True}

    assert run(tmp_path / "run", Named(), 1)[3][0]["validation"] == {"('a', 1)": 2.0, "3": 1.0}
    several = {"a": torch.tensor([[1, 2]]), "b": [True, 3], "c": 4}
    assert metrics_of(Named(), several, lists=True) == {"a": [[1.0, 2.0]], "b": [1.0, 3.0], "c": 4.0}
    with pytest.raises(InputError, match="'a'"):
        metrics_of(Named(), {"a": ["x"]}, lists=True)


JOB = """
from testing.faulty_jobs import Plain
class MadeUp(Plain):
    real_validation_batch = False
"""


def test_validating_one_by_hand_says_what_to_write(tmp_path, capfd):
    from memfit.apply.train_state import build
    from memfit.device.hardware.catalogue import with_memory
    from memfit.device.hardware.local_devices import local_cpu
    from memfit.loading import load_job
    from memfit.planner.request import PlanRequest
    from memfit.planner.search.search import find_plan
    from memfit.train.checkpoint.checkpoints import Checkpoints
    from memfit.train.checkpoint.saver import Saver

    (tmp_path / "made_up.py").write_text(JOB)
    name = f"{tmp_path}/made_up.py:MadeUp"
    job = load_job(name)
    plan = find_plan(
        job, PlanRequest(name=name, global_batch=4, device=with_memory(local_cpu(), 256 << 20), micro_batch=4)
    ).plan
    Saver(checkpoints=Checkpoints(tmp_path / "checkpoints"), plan=plan).save(build(job, "cpu"), 1)
    assert main([str(tmp_path), str(tmp_path / "values.json"), "0"]) == 2
    assert "no real samples to validate on; write validation_dataset(self) -> samples" in capfd.readouterr().err
