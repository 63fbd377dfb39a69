"""What a person does about torchtitan's errors: pytest tests/script/titan/test_advice.py"""

import pytest

from memfit.errors import InputError, is_installed
from memfit.script.outcome import NOT_FOLLOWED
from memfit.script.titan import advice as module
from memfit.script.titan.advice import advice
from memfit.script.titan.describe import describe_target
from memfit.script.titan.target import parse_target


@pytest.mark.parametrize(
    ("summary", "hint", "said"),
    [
        ("AssertionError: needs triton", NOT_FOLLOWED, "install triton, whose kernels these layers start"),
        ("NotImplementedError: please install apache-tvm-ffi", NOT_FOLLOWED, "install what it names"),
        ("ImportError: DeepEP v2 is required. Install from: its repository", "", "install what it names"),
        ("ValueError: tp does not divide the heads", NOT_FOLLOWED, "change the settings that it names"),
        ("No module named 'kernels'", "install kernels, or write --stub kernels if so", "install kernels"),
        ("ValueError: no row is selected", "a trace has no data", "a trace has no data"),
    ],
)
def test_what_torchtitan_says_counts_before_what_a_trace_does_not_follow(
    monkeypatch: pytest.MonkeyPatch, summary: str, hint: str, said: str
) -> None:
    monkeypatch.setattr(module, "is_installed", lambda package: False)
    assert advice(summary, hint) == said


@pytest.mark.skipif(not is_installed("torchtitan"), reason="torchtitan is not installed")
def test_settings_that_a_model_does_not_take_are_those_to_change() -> None:
    """Dispatchers of experts check the degrees of a configuration where the model is told of it."""
    with pytest.raises(InputError, match="requires expert parallelism") as refused:
        describe_target(parse_target("torchtitan:deepseek_v3_debugmodel_hybridep", None, {}))
    assert refused.value.write == "change the settings that it names"


@pytest.mark.skipif(not is_installed("torchtitan"), reason="torchtitan is not installed")
def test_experts_whose_tokens_go_through_symmetric_memory_are_refused_by_name() -> None:
    settings = {
        "parallelism.expert_parallel_degree": "2", "training.disable_cuda_graphs": "true",
        "activation_checkpoint": "full",
    }  # fmt: skip
    described = describe_target(parse_target("torchtitan:deepseek_v3_debugmodel_minimal_async_ep", None, settings))
    assert described.net.parameters > 0
    assert list(described.not_modelled) == ["symmetric memory (MinimalAsyncEPTokenDispatcher)"]
