"""memfit predict torchtitan:NAME: pytest tests/cli/test_titan_target.py"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.errors import is_installed
from memfit.installation import release_number
from tests.cli.asking import Run, is_one_line, really

PRESENT = is_installed("torchtitan")
needs_torchtitan = pytest.mark.skipif(not PRESENT, reason="torchtitan is not installed: pip install 'memfit[titan]'")
needs_torchao = pytest.mark.skipif(not is_installed("torchao"), reason="torchao is not installed: pip install torchao")
AT = ("predict", "torchtitan:llama3_debugmodel", "--device", "h100")
SMALL = ("--micro-batch", "2", "--set", "training.seq_len=256", "--set", "parallelism.spmd_backend=full_dtensor")


@pytest.mark.skipif(PRESENT, reason="torchtitan is installed")
def test_without_torchtitan_the_answer_says_what_to_install(run: Run) -> None:
    is_one_line(run(*AT), "torchtitan is not installed", "pip install 'memfit[titan]'")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--precision", "bf16"), "training.mixed_precision_param"),
        (("--checkpoint", "all"), "activation_checkpoint"),
        (("--engine", "fsdp2"), "--mesh"),
        (("--accumulate", "2"), "training.global_batch_size"),
        (("--mesh", "dp_shard=2", "--world", "4"), "the mesh has 2 ranks"),
        (("--config", "absent.toml"), "it cannot be read"),
    ],
)
def test_options_of_jobs_say_what_to_write_instead(run: Run, options: tuple[str, ...], words: str) -> None:
    is_one_line(run(*AT, *options), words)


def test_a_job_has_no_configuration(run: Run) -> None:
    is_one_line(run("predict", "f5_tts/tiny", "--config", "run.toml"), "it is for configurations of torchtitan")


def test_other_verbs_say_which_one_takes_a_configuration(run: Run) -> None:
    is_one_line(run("max", AT[1], "--device", "h100"), "is no job", "write memfit predict torchtitan:llama3_debugmodel")


def answer(*options: str) -> Any:
    code, out, err = really(*AT, *SMALL, "--json", *options)
    assert code == 0, err
    return json.loads(out)


@needs_torchtitan
@pytest.mark.slow
def test_torchtitans_own_trainer_is_predicted_and_its_state_is_sharded() -> None:
    two, four = answer("--world", "2"), answer("--world", "4")
    assert (two["engine"], two["world"], two["mesh"], four["mesh"]) == (
        "torchtitan",
        2,
        {"dp_shard": 2},
        {"dp_shard": 4},
    )
    assert (two["micro_batch"], two["settings"]["training.seq_len"], two["unit"]) == (2, "256", "rows")
    parameters = two["nets"][0]["parameters"]
    states = [each["phases"]["train"]["categories"]["optimizer"] for each in (two, four)]
    assert states == pytest.approx([8 * parameters / 2, 8 * parameters / 4], rel=0.01)
    assert any("CUDA graphs are off" in line for line in two["assumed"])


@needs_torchtitan
@pytest.mark.slow
def test_a_mesh_and_a_file_change_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[activation_checkpoint]\nmode = "none"\n')
    kept, full = (
        answer("--mesh", "dp_shard=2,tp=2", *more)
        for more in (("--config", str(path)), ("--set", "activation_checkpoint=full"))
    )
    assert kept["mesh"] == full["mesh"] == {"dp_shard": 2, "tp": 2}
    assert kept["phases"]["train"]["allocated_bytes"] > full["phases"]["train"]["allocated_bytes"]


@needs_torchtitan
@pytest.mark.slow
def test_a_compiled_configuration_is_predicted_and_says_that_it_is_not_validated() -> None:
    eager, compiled = answer("--world", "2"), answer("--world", "2", "--set", "compile.enable=true")
    assert eager["not_validated"] == []
    (line,) = compiled["not_validated"]
    assert line.startswith("no compiled run was measured (compile.enable, model and loss)")
    assert any("buffers that the code of torch's inductor" in line for line in compiled["assumed"])
    assert not any("as eager code" in line for line in compiled["assumed"]), "no block ran as it was written"
    peaks = [each["phases"]["train"]["allocated_bytes"] for each in (eager, compiled)]
    assert peaks[1] < peaks[0]
    code, out, err = really(*AT, *SMALL, "--set", "compile.enable=true")
    assert code == 0, err
    assert "Not validated: no compiled run was measured" in out


@needs_torchtitan
@pytest.mark.skipif(is_installed("torchao"), reason="torchao is installed")
def test_without_torchao_float8_says_what_to_install() -> None:
    is_one_line(
        really("predict", "torchtitan:llama3_debugmodel_float8", "--device", "h100"), "torchao is not installed"
    )


@needs_torchtitan
@needs_torchao
@pytest.mark.slow
def test_float8_is_predicted_with_torchao_s_tensors_and_says_that_it_is_not_validated() -> None:
    code, out, err = really("predict", "torchtitan:llama3_debugmodel_float8", "--device", "h100", *SMALL, "--json")
    assert code == 0, err
    (line,) = json.loads(out)["not_validated"]
    assert line.startswith("no run with quantized layers was measured")
    code, _, err = really("predict", "torchtitan:llama3_debugmodel_float8", "--device", "a100-80gb", *SMALL)
    assert code == 2
    assert "only supported on NVIDIA SM89 or later" in err


@needs_torchtitan
@needs_torchao
@pytest.mark.skipif(is_installed("triton"), reason="triton is installed")
@pytest.mark.slow
def test_layers_whose_kernels_are_triton_s_say_so() -> None:
    code, _, err = really("predict", "torchtitan:deepseek_v3_debugmodel_mxfp8", "--device", "b200", *SMALL)
    assert code == 2
    assert "install triton" in err


@needs_torchtitan
@pytest.mark.slow
def test_flux_is_predicted_with_images_that_are_made_up() -> None:
    """Its text encoder T5 has 4.76 billion parameters in bfloat16, which FSDP divides over the ranks."""
    answers = []
    for size in ("256", "512"):
        options = ("--world", "2", "--micro-batch", "2", "--set", "parallelism.spmd_backend=partial_dtensor")
        flux = ("predict", "torchtitan:flux_debugmodel", "--device", "h100", *options, "--json")
        code, out, err = really(*flux, "--set", f"dataloader.img_size={size}")
        assert code == 0, err
        answers.append(json.loads(out))
    small = answers[0]
    assert "no run that reads images was measured" in small["not_validated"][0]
    assert [each["settings"]["training.seq_len"] for each in answers] == [256 + 256, 1024 + 256]
    peaks = [each["phases"]["train"]["allocated_bytes"] for each in answers]
    assert 4.7e9 < peaks[0] < peaks[1]


@needs_torchtitan
@pytest.mark.slow
def test_segments_that_expand_are_replayed_where_the_launch_has_them() -> None:
    plain, expanding = answer(), answer("--set", "PYTORCH_ALLOC_CONF=expandable_segments:True")
    assert expanding["settings"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert expanding["phases"]["train"]["reserved_bytes"] < plain["phases"]["train"]["reserved_bytes"]
    assert expanding["phases"]["train"]["allocated_bytes"] == plain["phases"]["train"]["allocated_bytes"]


@needs_torchtitan
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("torchtitan:llama3_8b", "--world", "3", "--mesh", "tp=2"), "the mesh has 2 ranks"),
        (("torchtitan:llama3_70b", "--world", "4"), "its degrees"),
        (("torchtitan:nothing_like_it",), "torchtitan has no such configuration"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    is_one_line(really("predict", *words, "--device", "h100"), said)


BEFORE_2_14 = release_number(torch.__version__) < (2, 14)
WITHOUT_GRAPHS = ("--set", "training.disable_cuda_graphs=true")
needs_pipelines = pytest.mark.skipif(BEFORE_2_14, reason="schedules take torchtitan's micro-batches from torch 2.14 on")


@needs_torchtitan
@pytest.mark.skipif(not BEFORE_2_14, reason="torch 2.14 and later have arg_mbs")
def test_pipelines_are_refused_while_schedules_take_no_micro_batches() -> None:
    is_one_line(
        really(*AT, *SMALL, *WITHOUT_GRAPHS, "--mesh", "pp=2,dp_shard=2"), "(arg_mbs)", "torch 2.14, or leave pp out"
    )


@needs_torchtitan
def test_pipelines_say_that_cuda_graphs_must_be_off() -> None:
    is_one_line(really(*AT, *SMALL, "--mesh", "pp=2"), "CUDA graphs do not support pipeline parallelism")


@needs_torchtitan
@needs_pipelines
@pytest.mark.slow
def test_of_a_pipeline_s_ranks_the_one_that_needs_most_is_named() -> None:
    asked = (*WITHOUT_GRAPHS, "--mesh", "pp=2,dp_shard=2")
    most, *ranks = (answer(*asked, *more) for more in ((), ("--rank", "0"), ("--rank", "2"), ("--rank", "3")))
    peaks = {each["rank"]: each["phases"]["train"]["process_bytes"] for each in ranks}
    assert most["mesh"] == {"pp": 2, "dp_shard": 2}
    assert list(peaks) == [0, 2, 3]
    assert most["rank"] == max((0, 2), key=lambda rank: peaks[rank])
    assert most["phases"]["train"]["process_bytes"] == peaks[most["rank"]]
    assert peaks[3] <= peaks[2], "ranks of one stage have equal parts, or smaller ones"
    assert "each place in the pipeline" in most["rank_reason"]


@needs_torchtitan
@needs_pipelines
@pytest.mark.slow
def test_a_zero_bubble_schedule_says_which_checkpointing_it_takes() -> None:
    schedule = ("--set", "parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--mesh", "pp=2", "--rank", "0")
    code, _, err = really(*AT, *SMALL, *WITHOUT_GRAPHS, *schedule)
    assert code == 2
    assert "write --set activation_checkpoint=full or none" in err
    assert answer(*WITHOUT_GRAPHS, *schedule, "--set", "activation_checkpoint=none")["rank"] == 0


@needs_torchtitan
@pytest.mark.skipif(not BEFORE_2_14, reason="torch 2.14 and later take spmd_types")
def test_spmd_types_on_several_ranks_says_which_torch_takes_it() -> None:
    is_one_line(really(*AT, "--world", "2"), "--set parallelism.spmd_backend=full_dtensor, or install torch 2.14")


@needs_torchtitan
@needs_pipelines
@pytest.mark.skipif(not is_installed("fla"), reason="flash-linear-attention is not installed")
@pytest.mark.slow
def test_images_on_a_pipeline_are_as_many_on_each_stage() -> None:
    """The first stage, which puts images in the place of their tokens, is of another rank than the traced one."""
    images = ("predict", "torchtitan:qwen35_debugmodel_moe", "--device", "h200", *WITHOUT_GRAPHS)
    code, out, err = really(*images, "--rank", "4", "--json")
    assert code == 0, err
    assert json.loads(out)["mesh"] == {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4}


@needs_torchtitan
@pytest.mark.slow
def test_variable_length_attention_needs_no_kernels_of_a_card() -> None:
    """FlashAttention 3 on an H100, which attends to rows in their documents: its peak is near that of FlexAttention."""
    packed, flex = (
        really("predict", f"torchtitan:{name}", *AT[2:], *SMALL, "--json")
        for name in ("llama3_debugmodel_varlen_attn", "llama3_debugmodel")
    )
    assert (packed[0], flex[0]) == (0, 0), packed[2]
    peaks = [json.loads(out)["phases"]["train"]["allocated_bytes"] for _, out, _ in (packed, flex)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)
