"""Loops of recipes: accumulation, and optimizers that the environment lacks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.accuracy_parts import earlier_adam, litgpt_nets, loop, quantized_state, timm_fits
from bench.accuracy_parts.convolution_passes import Pass
from bench.accuracy_parts.loop import Loop, trace_loop
from bench.accuracy_parts.nets_by_name import Built
from bench.convolution_workspaces import by_effect, copies, winograd
from memfit.device.hardware.catalogue import find_device
from memfit.events import FREE
from memfit.planner.live_bytes import live_bytes_of
from memfit.planner.prediction import footprint_on

WEIGHTS = 3 * 8 * 8 * 4096


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3 * 8 * 8, 4096, bias=False)

    def forward(self, images):
        return self.body(images.flatten(1))


def peak(monkeypatch, **asked):
    """Bytes alive at the peak of a loop over a net of WEIGHTS parameters."""
    monkeypatch.setattr(loop, "build_net", lambda asked: Built(net=Net()))
    given = {"net": "x", "kind": "timm", "batch": 2, "image": 8, "optimizer": "SGD", "zero_grad": "after_step"}
    card = find_device("rtx3060")
    return footprint_on(trace_loop(Loop(**given | asked), card), card).phases["train"].allocated_bytes


def test_a_loop_that_accumulates_holds_its_gradients_while_the_next_ones_are_made(monkeypatch):
    plain = peak(monkeypatch, iterations=4)
    accumulated = peak(monkeypatch, iterations=4, accumulates=True)
    assert accumulated - plain == pytest.approx(4 * WEIGHTS, rel=0.02)


def test_a_script_that_begins_with_its_longest_sample_has_shorter_ones_after_it(monkeypatch):
    lengths = []

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 4)

        def forward(self, input_ids, labels):
            lengths.append(input_ids.shape[1])
            return SimpleNamespace(loss=self.table(input_ids).sum())

    for later, seen in ((None, [64, 64, 64]), (16, [64, 16, 16])):
        lengths.clear()
        monkeypatch.setattr(loop, "build_net", lambda asked: Built(net=Words()))
        trace_loop(Loop(net="x", kind="causal-lm", length=64, later_length=later), find_device("rtx3060"))
        assert lengths == seen


class Attending(nn.Module):
    def __init__(self, softmax):
        super().__init__()
        self.softmax, self.first, self.second = softmax, nn.Linear(192, 4096), nn.Linear(4096, 4096)

    def forward(self, images):
        return self.softmax(self.second(self.softmax(self.first(images.flatten(1)))))


@pytest.mark.parametrize(
    "softmax",
    [lambda x: x.softmax(-1), lambda x: nn.functional.log_softmax(x, dim=-1), lambda x: torch.softmax(input=x, dim=-1)],
)
def test_softmax_before_torch_1_11_keeps_its_input_until_its_backward(monkeypatch, softmax):
    monkeypatch.setattr(loop, "build_net", lambda asked: Built(net=Attending(softmax)))
    card = find_device("rtx3060")

    def bytes_and_frees(**asked):
        trace = trace_loop(Loop(net="x", kind="timm", batch=256, image=8, optimizer="SGD", **asked), card)
        return live_bytes_of(trace, card).peaks()["train"], int((trace.kind == FREE).sum())

    later, earlier = bytes_and_frees(torch="1.11.0"), bytes_and_frees(torch="1.10.2")
    # the peak lies in the backward of the first layers: what the second softmax has kept is gone by then
    assert earlier == (later[0] + 4 * 256 * 4096, later[1])


class Heads(nn.Module):
    """Layers of attention over 64 parts of an image."""

    def __init__(self, layers, *, recompute):
        super().__init__()
        self.recompute, self.embed = recompute, nn.Linear(3, 512)
        self.layers = nn.ModuleList(nn.MultiheadAttention(512, 8, batch_first=True) for _ in range(layers))

    def forward(self, images):
        hidden = self.embed(images.flatten(2).transpose(1, 2))
        for layer in self.layers:
            hidden = checkpoint(attend, layer, hidden, use_reentrant=False) if self.recompute else attend(layer, hidden)
        return hidden.mean(1)


def attend(layer, hidden):
    return layer(hidden, hidden, hidden, need_weights=False)[0]


@pytest.mark.parametrize(
    ("precision", "recompute", "kept"), [("bf16", False, 1), ("bf16", True, 0), ("fp32", False, 0)]
)
def test_attention_before_torch_2_2_has_its_output_by_samples_and_keeps_a_copy(monkeypatch, precision, recompute, kept):
    card, batch = find_device("a100-40gb"), 32

    def peak_of(layers, version):
        monkeypatch.setattr(loop, "build_net", lambda asked: Built(net=Heads(layers, recompute=recompute)))
        asked = {"net": "x", "kind": "timm", "batch": batch, "image": 8, "optimizer": "SGD", "precision": precision}
        return live_bytes_of(trace_loop(Loop(torch=version, **asked), card), card).peaks()["train"]

    assert peak_of(2, "2.2.1") == peak_of(2, "")
    more = [peak_of(layers, "2.1.0.dev20230623+cu118") - peak_of(layers, "2.2.1") for layers in (4, 12)]
    output = batch * 64 * 512 * 2
    assert (more[1] - more[0]) / output == pytest.approx(8 * kept, abs=0.1)


@pytest.mark.parametrize(("net", "traces"), [(Net(), 2), (Attending(lambda x: x.softmax(-1)), 4)])
def test_a_net_without_softmax_is_traced_once_for_all_versions_of_torch(monkeypatch, net, traces):
    row = {"model": "x", "layout": "nchw", "image": 8, "ran": 8, "failed": 12}
    runs = [timm_fits.FitRun(torch=version, **row) for version in ("1.10", "1.11", "1.12")]
    built = []

    def build(asked):
        built.append(asked)
        return Built(net=net)

    def trace(asked, card):
        return trace_loop(replace(asked, optimizer="SGD"), card)

    monkeypatch.setattr(timm_fits.environments, "enter", lambda name: None)
    monkeypatch.setattr(timm_fits, "trace_loop", trace)
    monkeypatch.setattr(loop, "build_net", build)
    answers = timm_fits._group(runs)
    assert [answer.run.torch for answer in answers] == ["1.10", "1.11", "1.12"]
    assert len(built) == traces


def test_adam_before_july_2023_holds_one_intermediate_more(monkeypatch):
    assert peak(monkeypatch, optimizer="earlier.Adam") - peak(monkeypatch, optimizer="Adam") == 4 * WEIGHTS


def test_adam_before_july_2023_goes_where_adam_goes():
    start, gradient = torch.randn(5), torch.randn(5)
    ends = []
    for made in (earlier_adam.Adam, torch.optim.Adam):
        parameter = nn.Parameter(start.clone())
        optimizer = made([parameter], lr=0.1, **({"foreach": True} if made is torch.optim.Adam else {}))
        parameter.grad = gradient.clone()
        optimizer.step()
        assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
        ends.append(optimizer.state[parameter]["exp_avg_sq"])
    assert torch.allclose(*ends)


@pytest.mark.parametrize(
    ("arguments", "nbytes"),
    [
        ({"bits": 8, "block": 2048}, 2 * 8192 + 2 * 4 * 4),
        ({"bits": 4, "block": 128}, 8192 + 2 * 4 * 64),
        ({"bits": 4, "block": 128, "rank_one": True}, 8192 + 4 * 64 + 4 * (64 + 128)),
    ],
)
def test_quantized_state_has_codes_and_scales(arguments, nbytes):
    large, small = nn.Parameter(torch.zeros(64, 128)), nn.Parameter(torch.zeros(64))
    optimizer = quantized_state.AdamW([large, small], lr=1e-3, **arguments)
    for parameter in (large, small):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [sum(value.nbytes for value in optimizer.state[parameter].values()) for parameter in (large, small)]
    assert state == [nbytes, 2 * 4 * 64]
    before = optimizer.state[large]["exp_avg"]
    optimizer.step()
    assert optimizer.state[large]["exp_avg"] is before, "a later step makes none"


@pytest.mark.parametrize("method", ["lora", "full"])
def test_litgpt_s_loss_is_the_cross_entropy_of_the_next_tokens(method):
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 300, 7), torch.randint(0, 7, (2, 300))
    plain = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 7), targets[:, 1:].reshape(-1))
    outputs = logits if method == "full" else list(logits.split(litgpt_nets.CHUNK, dim=1))
    assert torch.allclose(litgpt_nets.loss_of(outputs, targets, method), plain)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_litgpt_s_logits_are_float32_as_fabric_returns_them(method):
    class Head(nn.Module):
        def forward(self, ids, lm_head_chunk_size=0):
            logits = ids[..., None].to(torch.bfloat16)
            return list(logits.split(lm_head_chunk_size, dim=1)) if lm_head_chunk_size else logits

    outputs = litgpt_nets.outputs_of(Head(), torch.zeros(2, 300, dtype=torch.int64), method)
    chunks = [outputs] if method == "full" else outputs
    assert [chunk.dtype for chunk in chunks] == [torch.float32] * (1 if method == "full" else 3)


def a_pass(**changed):
    given = {
        "kind": "input", "x": (2, 8, 16, 16), "weight": (4, 8, 3, 3), "stride": (1, 1), "padding": (1, 1),
        "dilation": (1, 1), "groups": 1, "copies": True,
    }  # fmt: skip
    return Pass(**given | changed)


def test_rules_of_workspaces_count_the_tensors_of_a_pass():
    assert a_pass().out == (2, 4, 16, 16)
    assert a_pass(stride=(2, 2), padding=(0, 0)).out == (2, 4, 7, 7)
    assert copies(a_pass()) == 4 * (2 * 8 * 256 + 4 * 8 * 9 + 2 * 4 * 256)
    assert copies(a_pass(copies=False)) == 0
    assert winograd(a_pass()) == 4 * 36 * (2 * 16 * (8 + 4) + 4 * 8)


def test_coverage_is_counted_by_effect_and_half():
    row = {"model": "a", "effect": 0.2, "fitting_half": True, "measured_mib": 115.0, "low": 90.0, "margin_high": 110.0,
           "high": 120.0, "mib": {"copies around both gradients (memfit)": 100.0}}  # fmt: skip
    (own,) = by_effect([row, row | {"measured_mib": 105.0}])
    assert (own["margin_alone"], own["with_twice"], own["runs"], own["nets"]) == (0.5, 1.0, 2, 1)
