import pytest

from memfit.cli import doctor
from memfit.trace import self_test


def test_the_installed_torch_gives_the_known_bytes(monkeypatch):
    monkeypatch.setattr(self_test, "ENGINES", (("single", 1),))
    kept = []
    monkeypatch.setattr(self_test, "remember", kept.append)
    answer = self_test.run()
    assert answer.passed, answer.differences
    assert kept == [[]]


def test_doctor_runs_it(monkeypatch):
    monkeypatch.setattr(self_test, "_differences", lambda: iter(["a byte", "another"]))
    monkeypatch.setattr(self_test, "remember", lambda differences: None)
    answer = doctor.self_test()
    assert answer.pop("seconds") >= 0
    assert answer == {"ok": False, "text": "a byte; another", "differences": ["a byte", "another"]}


@pytest.mark.parametrize("where", ["card", "cpu"])
def test_a_byte_that_differs_is_named(monkeypatch, where, capsys):
    monkeypatch.setattr(self_test, "ENGINES", (("single", 1),))
    monkeypatch.setattr(self_test, "JOBS", {"convolution": self_test.JOBS["convolution"]})
    monkeypatch.setattr(self_test, "remember", lambda differences: None)
    if where == "card":
        known = {"convolution, single x 1": self_test.KNOWN["convolution, single x 1"] | {"train": 1}}
        monkeypatch.setattr(self_test, "KNOWN", known)
        line = "convolution, single x 1 on rtx4090, train: 18734516 bytes instead of 1"
    else:
        measured = self_test._measured
        monkeypatch.setattr(self_test, "_measured", lambda *args: measured(*args) | {"save": 2})
        line = "convolution on the CPU, save: "
    assert self_test.main() == 4
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(("version", "fewer"), [("2.6.0+cu124", 8), ("2.7.1", 0), ("2.15.0", 0)])
def test_flash_attention_keeps_less_before_torch_2_7(version, fewer):
    for name, known in self_test.KNOWN.items():
        expected = known["train"] - (fewer if "transformer" in name else 0)
        assert self_test.known_peaks(name, version) == known | {"train": expected}
