"""python -m pytest tests/bench/test_formats.py"""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.accuracy_parts import estimators, formats, loop, recipes, timm_fits, xmem
from bench.accuracy_parts.formats import format_of
from bench.accuracy_parts.loop import Loop, trace_loop
from bench.accuracy_parts.nets_by_name import Built, configurations
from bench.accuracy_parts.sampling import fair_sample
from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError

KIB = 1024


def table(path, columns, *rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("name", list(formats.FORMATS))
def test_a_format_is_told_by_its_columns_and_more_columns_do_no_harm(tmp_path, name):
    assert format_of(table(tmp_path / "t.csv", ["more", *formats.FORMATS[name]])) == name


def test_a_table_of_no_format_is_refused_with_the_columns_of_the_nearest(tmp_path):
    columns = [name for name in formats.FORMATS["timm_amp"] if name != "layout"]
    with pytest.raises(InputError, match="no column layout; write the columns model, layout, torch"):
        format_of(table(tmp_path / "t.csv", columns))
    with pytest.raises(InputError, match="no such file"):
        format_of(tmp_path / "none.csv")


def test_samples_are_the_same_everywhere_and_each_is_part_of_a_larger_one():
    names = [f"net{number}" for number in range(50)]
    assert fair_sample(names, 5, 1) == fair_sample(reversed(names), 9, 1)[:5]
    assert fair_sample(names, 5, 1) != fair_sample(names, 5, 2)
    assert len(fair_sample(names, None, 1)) == 50


def fit(ran, failed):
    run = timm_fits.FitRun(model="n", layout="nchw", torch="1.12", image=224, ran=8, failed=16 if failed else None)
    return timm_fits.FitAnswer(run=run, net_kind="k", ran=ran, failed=failed)


def test_shares_of_what_ran_and_what_failed():
    rows = [
        fit((True, "yes", 0.5), (False, "no", 1.3)),
        fit((True, "close", 0.9), (True, "close", 0.97)),
        fit((False, "no", 1.2), (True, "yes", 0.8)),
        fit((True, "yes", 0.1), None),
    ]
    figures = timm_fits.statistics(rows)
    assert (figures["rows"], figures["failed_rows"], figures["ran_fits"]) == (4, 3, 0.75)
    assert (figures["failed_does_not"], figures["close"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert (figures["clear_wrong"], figures["clear_verdicts"]) == (pytest.approx(2 / 5), 5)


def test_kernels_are_loaded_at_once_before_cuda_11_7_and_gradients_are_zeroed_before_torch_2(tmp_path):
    row = dict(zip(timm_fits.COLUMNS, ("resnet18", "nhwc", "1.12", "224", "512", ""), strict=True))
    (run,) = timm_fits.read(table(tmp_path / "t.csv", timm_fits.COLUMNS, row))
    assert run.failed is None
    asked = timm_fits.loop_of(run, 64)
    assert (asked.batch, asked.channels_last, asked.is_before((2, 0))) == (64, True, True)
    assert timm_fits.card("1.12").context_bytes > 3 * timm_fits.card("2.1").context_bytes


XMEM = {
    "card": "NVIDIA GeForce RTX 3060", "model": "T5-small", "optimizer": "Adam", "batch": "9", "notes": "",
    "seq_or_image": "<=128 tokens, padded to longest in batch", "zero_grad": "mode 2 = after step", "oom": "0",
    "measured_peak_bytes": "1000", "est_xmem": "1100", "est_dnnmem": "", "est_schedtune": "500", "est_llmem": "-1",
}  # fmt: skip


def test_a_run_of_xmem_becomes_its_trainer_s_loop(tmp_path):
    rows = [XMEM, XMEM | {"model": "VGG16", "seq_or_image": "86x86x3", "zero_grad": "not recorded (null)"}]
    texts, images = xmem.read(table(tmp_path / "t.csv", list(XMEM), *rows))
    assert texts.estimates == {"xmem": 1100.0, "schedtune": 500.0}
    first, second = xmem.loop_of(texts), xmem.loop_of(images)
    assert (first.kind, first.zero_grad, first.cublas_workspace) == ("seq2seq-lm", "after_step", True)
    assert (second.kind, second.image, second.zero_grad, second.cublas_workspace) == ("torchvision", 86, "start", False)


def test_the_context_is_in_no_difference_of_readings_but_is_not_free(tmp_path):
    card, own = find_device("rtx3060"), xmem.card("NVIDIA GeForce RTX 3060")
    assert own.usable_bytes - own.context_bytes == card.usable_bytes - card.context_bytes
    assert own.context_bytes == xmem.LOADED_LATER[1]


def test_every_estimator_is_judged_on_the_runs_that_it_has_an_estimate_for(tmp_path):
    (run,) = xmem.read(table(tmp_path / "t.csv", list(XMEM), XMEM))
    good = xmem.XmemAnswer(run=run, net_kind="k", predicted=990, low=900, high=1100, fits=True, verdict="yes")
    figures = xmem.statistics([good])
    assert (figures["rows"], figures["xmem_rows"], figures["llmem_rows"]) == (1, 1, 0)
    assert figures["memfit_median"] == pytest.approx(0.01)
    assert figures["xmem_median"] == pytest.approx(0.1)
    assert figures["llmem_median"] is None
    assert figures["mem_tracker_rows"] == 0
    figures = xmem.statistics([replace(good, others={"mem_tracker": 750})])
    assert (figures["mem_tracker_rows"], figures["mem_tracker_median"]) == (1, pytest.approx(0.25))


def test_mem_tracker_runs_the_loop_of_a_row(monkeypatch):
    made = lambda asked: Built(net=nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)))  # noqa: E731
    monkeypatch.setattr(loop, "build_net", made)
    own = Loop(net="x", kind="torchvision", batch=2, image=8, optimizer="Adam", iterations=1)
    weights = 4 * (3 * 8 * 8 * 10 + 10)
    assert 4 * weights <= estimators.by_mem_tracker(own)["mem_tracker"] < 7 * weights
    monkeypatch.setattr(loop, "build_net", lambda asked: 1 / 0)
    assert estimators.by_mem_tracker(own) == {}


def test_half_of_a_convolution_net_s_weights_may_be_in_the_first_reading(tmp_path):
    (run,) = xmem.read(table(tmp_path / "t.csv", list(XMEM), XMEM | {"seq_or_image": "86x86x3"}))
    answer = xmem.XmemAnswer(
        run=run, net_kind="k", predicted=1050, low=900, high=1300, fits=True, verdict="yes", copied_early=100
    )
    assert (answer.error, answer.error_from_empty) == pytest.approx((0.05, 0.15))
    figures = xmem.statistics([answer])
    assert figures["memfit_p90"] == pytest.approx(0.05)
    assert figures["memfit_p90_from_empty"] == pytest.approx(0.15)


def test_weights_are_parameters_and_buffers(monkeypatch):
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10), nn.BatchNorm1d(10))
    monkeypatch.setattr(loop, "build_net", lambda asked: Built(net=net))
    own = Loop(net="x", kind="torchvision", batch=2, image=8, optimizer="SGD", iterations=1)
    trace = trace_loop(own, find_device("rtx3060"))
    floats = 3 * 8 * 8 * 10 + 10 + 4 * 10
    assert xmem.weight_bytes(trace) == 4 * floats + 8, "and batch norm's count of batches"


def test_recipes_name_the_loops_of_their_rows_and_other_rows_are_counted(tmp_path):
    row = dict.fromkeys(recipes.COLUMNS, "")
    row |= {"source": "highwaterlabs/torch-preflight x", "model": "bert-base-uncased", "batch": "8", "seq": "256",
            "precision": "fp16 autocast", "metric": "max_memory_allocated", "unit": "bytes", "value": "7",
            "versions": "driver 5, torch 2.11.0+cu128, timm 1"}  # fmt: skip
    rows = [row, row | {"value": "OOM"}, row | {"source": "someone"}, row | {"unit": "GiB", "value": "1.5"}]
    rows[3]["versions"] = "not stated"
    figures, without = recipes.read(table(tmp_path / "t.csv", [*recipes.COLUMNS, "versions"], *rows))
    assert [figure.torch_version for figure in figures] == ["2.11.0+cu128", None]
    assert sum(without.values()) == 2
    assert without["not known"] == 1, "nobody has said why a row of an unknown source has none"
    assert [figure.measured for figure in figures] == [7, 3 << 29]
    asked = figures[0].loop
    assert (asked.batch, asked.length, asked.kind, asked.net) == (8, 256, "encoder", "bert-base-uncased")
    assert asked.precision == "bf16-autocast", "what the script takes on a T4, whatever the table calls it"


def litgpt_row(**changed):
    """A row of litgpt's tables as the file of published figures writes them."""
    given = {"model": "x", "batch": "2", "seq": "512", "unit": "GB (1e9)", "value": "7", "world": "1"}
    return dict.fromkeys((*recipes.COLUMNS, "world"), "") | given | changed


@pytest.mark.parametrize(
    ("folder", "net", "quantize", "rank"),
    [
        ("gemma2-9b/qlora.yaml", "Gemma-2-9b", "nf4", 16), ("gemma-7b/lora.yaml", "Gemma-7b", "", None),
        ("llama-3.2-3B/qlora.yaml", "Llama-3.2-3B", "nf4", 32),
        ("mistral-7b-v0.2/lora.yaml", "Mistral-7B-v0.2", "", 32),
    ],
)  # fmt: skip
def test_a_recipe_names_the_net_by_an_expression_of_a_column(tmp_path, folder, net, quantize, rank):
    source = f"Lightning-AI/litgpt config_hub/finetune/README.md + {folder} @HEAD 1"
    rows = [litgpt_row(source=source), litgpt_row(source=source.replace(folder, "other-1b/lora.yaml"))]
    figures, without = recipes.read(table(tmp_path / "t.csv", [*recipes.COLUMNS, "world"], *rows))
    assert sum(without.values()) == 1, "a net that the recipe does not name is not taken for another"
    (own,) = figures
    assert (own.loop.net, own.loop.quantize, own.loop.net_arguments.get("lora_r")) == (net, quantize, rank)
    assert own.loop.uses_bitsandbytes == bool(quantize)


def test_a_mode_of_quantization_that_bitsandbytes_lacks_is_refused(tmp_path):
    (tmp_path / "x.toml").write_text('[[recipe]]\ncard = "t4"\nmetric = "allocated"\nloop = { quantize = "nf3" }\n')
    with pytest.raises(InputError, match=r"x.toml: loop.quantize.*nf4-dq"):
        recipes.read_recipes(tmp_path)


def test_every_published_row_has_a_recipe_or_a_reason_why_it_has_none():
    public = Path(__file__).resolve().parents[3] / "shared" / "data" / "measured_public.csv"
    if not public.exists():
        pytest.skip("the table of published figures is not beside the repository")
    figures, without = recipes.read(public)
    assert len(figures) >= 72
    assert "not known" not in without, without


def test_an_optimizer_of_torchao_and_checkpoints_of_timm_are_fields_of_a_loop(monkeypatch):
    made = []

    class Net(nn.Linear):
        def set_grad_checkpointing(self):
            made.append("checkpoints")

        def forward(self, images):
            return super().forward(images.flatten(1))

    monkeypatch.setattr(loop, "build_net", lambda asked: Built(net=Net(3 * 8 * 8, 2)))
    own = Loop(net="x", kind="timm", batch=2, image=8, gradient_checkpointing=True, compiled=True, iterations=2)
    trace = trace_loop(own, find_device("rtx3060"))
    assert made == ["checkpoints"]
    assert trace.net_kind == "compiled matmul, float32"


def test_a_recipe_with_a_field_that_no_loop_has_is_refused(tmp_path):
    (tmp_path / "x.toml").write_text('[[recipe]]\ncard = "t4"\nmetric = "allocated"\nloop = { nett = "a" }\n')
    with pytest.raises(InputError, match=r"x.toml: loop.nett"):
        recipes.read_recipes(tmp_path)


def test_every_configuration_says_its_type():
    assert all("model_type" in entries for entries in configurations().values())


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 1024, bias=False)
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)

    def forward(self, input_ids):
        class Outputs:
            last_hidden_state = self.body(input_ids[..., None].to(self.body.weight.dtype).expand(-1, -1, 64))

        return Outputs


def loop_of(**asked):
    given = {"net": "wide", "kind": "encoder", "batch": 2, "length": 16, "loss": "mean_square", "optimizer": "SGD"}
    return Loop(**given | {"keeps_batch": True, "iterations": 2} | asked)


def traced(monkeypatch, **asked):
    monkeypatch.setattr(loop, "build_net", lambda asked: Built(net=Wide()))
    return trace_loop(loop_of(**asked), find_device("t4"))


def live_at_forward(trace, category):
    """Bytes of a category at the start of the last iteration's forward."""
    from memfit.events import ALLOCATE, CATEGORIES, FREE

    start = next(first for name, first, _ in reversed(trace.phases) if name == "train")
    alive = set()
    for kind, storage in zip(trace.kind[:start].tolist(), trace.storage[:start].tolist(), strict=True):
        if kind == ALLOCATE:
            alive.add(storage)
        elif kind == FREE:
            alive.discard(storage)
    wanted = CATEGORIES.index(category)
    return sum(int(trace.nbytes[storage]) for storage in alive if trace.category[storage] == wanted)


def test_a_loop_s_outputs_live_until_the_next_ones_are_there_and_a_function_s_do_not(monkeypatch):
    def alive(**asked):
        trace = traced(monkeypatch, **asked)
        return sum(live_at_forward(trace, name) for name in ("activations", "temporaries"))

    outputs = 2 * 16 * 1024 * 4
    assert alive(step_is_function=False) - alive(step_is_function=True) >= outputs


@pytest.mark.parametrize(("mode", "kept"), [("start", 256 * KIB), ("after_step", 0)])
def test_gradients_live_between_iterations_unless_they_go_after_the_step(monkeypatch, mode, kept):
    assert live_at_forward(traced(monkeypatch, zero_grad=mode), "gradients") == kept


def test_before_torch_2_gradients_are_never_freed(monkeypatch):
    trace = traced(monkeypatch, zero_grad="after_step", torch="1.13.1")
    assert live_at_forward(trace, "gradients") == 256 * KIB


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16-autocast", 4), ("bf16", 2)])
def test_estimates_by_parameters_count_each_parameter_once(monkeypatch, precision, size):
    result = estimators.by_parameters(traced(monkeypatch, precision=precision), loop_of(precision=precision))
    trained, frozen = 64 * 1024, 64 * 64
    assert result == {
        "parameters_x_16": 16 * trained + size * frozen,
        "accelerate": 4 * size * (trained + frozen),
        "deepspeed_zero2": 20 * (trained + frozen),
    }


def test_bf16_attention_on_a_t4_is_the_math_kernel_s_and_fp16_the_efficient_one_s():
    from memfit.device.virtual.attention import choose
    from memfit.device.virtual.card_rules import card_rules

    card = card_rules(find_device("t4"))
    for dtype, kernel in ((torch.bfloat16, "math"), (torch.float16, "efficient")):
        q = torch.empty(2, 12, 256, 64, dtype=dtype, device="meta", requires_grad=True)
        assert choose(card, q, q, q, dropout_p=0.1) == kernel


def test_results_are_there_after_each_net_and_a_net_that_fails_is_named(tmp_path, monkeypatch):
    rows = [dict(zip(timm_fits.COLUMNS, (name, "nchw", "1.12", "224", "8", "16"), strict=True)) for name in "abc"]
    path = table(tmp_path / "t.csv", timm_fits.COLUMNS, *rows)

    def answers(runs, workers):
        for run in runs:
            answer = timm_fits.FitAnswer(run=run, net_kind="k", ran=(True, "yes", 0.5), failed=(False, "no", 1.5))
            yield timm_fits.Untraced(name="b", why="no such net") if run.model == "b" else [answer]

    monkeypatch.setattr(timm_fits, "answers", answers)
    noted = []
    collected = [judged.as_json() for judged in formats.judge(path, None, 0, 0, noted.append)]
    assert len(collected) == 3
    assert collected[-1]["timm_amp"]["rows"] == 2
    assert collected[-1]["not_traced"] == {"b": "no such net"}
    assert noted == ["not traced: b: no such net"]
