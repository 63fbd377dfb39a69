"""Configurations of torchtitan's registries, and settings that are changed by name."""

from collections.abc import Iterator
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.script.titan.target import TitanTarget

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install 'memfit[titan]'")


@pytest.fixture(autouse=True, scope="module")
def _importable() -> Iterator[None]:
    from memfit.script.titan.config import importable

    with importable():
        yield


def loaded(config: str, module: str = "", **changes: Any) -> Any:
    from memfit.script.titan.config import load_config

    by_name = {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(TitanTarget(module=module, config=config, changes=by_name))


def test_a_configuration_is_found_by_its_name_alone() -> None:
    assert loaded("llama3_8b").model_spec.flavor == loaded("llama3_8b", "llama3").model_spec.flavor == "8B"
    assert loaded("qwen3_0_6b").model_spec.name == "qwen3"


def test_settings_are_read_in_their_types() -> None:
    config = loaded(
        "llama3_debugmodel", training__local_batch_size="2", training__max_norm="0.5", compile__enable="false",
        parallelism__spmd_backend="full_dtensor", debug__seed="none", loss__num_chunks=1,
        activation_checkpoint__mode="full", compile__components="model,loss",
    )  # fmt: skip
    assert (config.training.local_batch_size, config.training.max_norm, config.loss.num_chunks) == (2, 0.5, 1)
    assert (config.compile.enable, config.debug.seed, config.compile.components) == (False, None, ["model", "loss"])
    assert type(config.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert loaded("llama3_debugmodel", activation_checkpoint="none").activation_checkpoint is None


@pytest.mark.parametrize(
    ("config", "module", "changes", "words"),
    [
        ("llama3_8bb", "", {}, "write torchtitan:llama3/llama3_8b"),
        ("llama3_8bb", "", {}, "torchtitan has no such configuration"),
        ("llama3", "", {}, "a model of several configurations; write torchtitan: with one of llama3_debugmodel"),
        ("x", "lama", {}, "torchtitan has no such model; write one of deepseek_v3"),
        ("llama3_8b", "", {"training__seq_length": 4}, "has no seq_length; write training.seq_len"),
        ("llama3_8b", "", {"trainnig__steps": 4}, "has no trainnig; write training.steps"),
        ("llama3_8b", "", {"training__steps": "few"}, "training.steps=few: it takes int"),
        ("llama3_8b", "", {"training__dtype": "float16"}, "write one of bfloat16, float32"),
        ("llama3_8b", "", {"activation_checkpoint": "some"}, "write one of none, selective, full"),
        ("llama3_8b", "", {"activation_checkpoint": "memory_budget"}, "requires the model to be compiled"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_write(config: str, module: str, changes: Any, words: str) -> None:
    with pytest.raises(InputError) as mistake:
        loaded(config, module, **changes)
    assert words in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_an_older_version_is_refused_by_what_a_mock_says_is_installed(monkeypatch) -> None:
    from memfit.script.titan import config

    monkeypatch.setattr(config.importlib.metadata, "version", lambda name: "0.2.2")
    with (
        pytest.raises(InputError, match=r"torchtitan 0.2.2: memfit runs the trainer of torchtitan 0.3"),
        config.importable(),
    ):
        pass
