"""A target of torchtitan as a person writes it, without torchtitan: pytest tests/script/titan/test_target.py"""

from pathlib import Path

import pytest

from memfit.errors import InputError
from memfit.mesh import MeshShape
from memfit.script.titan.target import allocator_of, parse_target, ranks_of, target_from_json, without_variables

TOML = """
dump_folder = "here"
[training]
local_batch_size = 2
[activation_checkpoint]
mode = "full"
[loss.loss_fn]
x = true
"""


def test_a_target_names_a_configuration_its_model_or_both() -> None:
    only, both = parse_target("torchtitan:llama3_8b", None, {}), parse_target("torchtitan:llama3/llama3_8b", None, {})
    assert (only.module, only.config) == ("", "llama3_8b")
    assert (both.module, both.config) == ("llama3", "llama3_8b")
    assert parse_target("torchtitan:llama3", "llama3_8b", {}) == both
    assert parse_target("torchtitan:my.nets/small", None, {}).module == "my.nets"


def test_ranks_that_hold_experts_are_ranks_of_the_other_dimensions() -> None:
    assert ranks_of(MeshShape(dp_shard=4, tp=2, ep=8)) == 8


def test_set_changes_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    target = parse_target("torchtitan:llama3_8b", str(path), {"training.local_batch_size": "3"})
    assert dict(target.changes) == {
        "dump_folder": "here", "training.local_batch_size": "3", "activation_checkpoint.mode": "full",
        "loss.loss_fn.x": True,
    }  # fmt: skip
    assert target_from_json(target.to_json()) == target


def test_the_allocator_s_variable_is_no_setting_of_the_configuration() -> None:
    asked = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "training.steps": "3"}
    target, variables = without_variables(parse_target("torchtitan:llama3_8b", None, asked))
    assert dict(target.changes) == {"training.steps": "3"}
    assert allocator_of(variables) == "expandable_segments"
    assert allocator_of({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}) == allocator_of({}) == "default"
    with pytest.raises(InputError, match="only expandable_segments is replayed here"):
        allocator_of({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})


@pytest.mark.parametrize(
    ("job", "config", "why"),
    [
        ("torchtitan:llama3/llama3_8b", "llama3_70b", "both name a configuration"),
        ("torchtitan:llama3_8b", "absent.toml", "it cannot be read"),
        ("torchtitan:llama3_8b", "broken.toml", "it is no TOML"),
    ],
)
def test_a_mistake_says_what_to_write(job: str, config: str, why: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("[training")
    with pytest.raises(InputError, match=why) as mistake:
        parse_target(job, config, {})
    assert mistake.value.write.startswith("write ")
