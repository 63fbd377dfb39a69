"""Scripts that select by one value after another are traced again with an equal share for each value."""

from pathlib import Path

import pytest

from memfit.script.outcome import ScriptOutcome
from tests.script.script_trace import trace_alone, trace_here

SAMPLE = (Path(__file__).parent / "samples" / "experts.py").read_text()
SHARE = "128, an equal share of 1,024 for each of 8 values"


def traced(folder: Path, how: str, **request: object) -> ScriptOutcome:
    text = SAMPLE.replace("sys.argv[1]", repr(how))
    outcome = trace_here(folder, text, device="cpu", memory_bytes=8 << 30, **request)
    assert outcome.error is None, outcome.error.text
    return outcome


@pytest.mark.parametrize("how", ["where", "one_hot", "scatter", "checkpoint"])
def test_experts_of_a_loop_get_equal_shares(how: str, tmp_path: Path) -> None:
    first = traced(tmp_path, how)
    ((_, experts),) = first.walks
    assert experts == 8
    again = traced(tmp_path, how, walks=first.walks)
    assert again.walks == first.walks
    assert again.peak_bytes["train"] < 0.6 * first.peak_bytes["train"]
    assert SHARE in [answer.answer for answer in again.assumed]


def test_a_script_is_traced_again_and_a_size_that_a_person_gives_is_taken(tmp_path: Path) -> None:
    text = SAMPLE.replace("sys.argv[1]", "'where'")
    assert SHARE in [answer.answer for answer in trace_alone(tmp_path, text).assumed]
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "torch.where(ids" in line)
    given = trace_alone(tmp_path, text, assumed=(("train.py", line, "100"),))
    assert "100, as given" in [answer.answer for answer in given.assumed]
