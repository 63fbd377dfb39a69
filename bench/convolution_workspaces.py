"""Which rule for the workspaces of cuDNN's convolutions explains the nets that memfit predicts too low, and the others.

Measured: GPUMemNet's runs (timm's train.py, float32 with TF32, cudnn.benchmark, A100 40 GB). Each rule replays the same
traces with other workspaces. The two lists of nets were made by their errors, so that what they say of a rule is no
accuracy. The tables by effect are over these and a fair sample of all nets, and over the sample alone, each half apart.

python -m bench.convolution_workspaces                     writes bench/results/convolution_workspaces.json
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from bench.accuracy import PUBLIC, install_timm
from bench.accuracy_parts.convolution_passes import Pass, Rule, trace_passes
from bench.accuracy_parts.fitting import context_bytes
from bench.accuracy_parts.gpumemnet import DEVICE, TORCH
from bench.accuracy_parts.statistics import regular
from bench.accuracy_parts.table import MIB, Run, is_fitting_half, models_in_order, read_table
from bench.result_file import add_json_option, target, write_result
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.planner.prediction import footprint_on
from memfit.replay.margins import WITHOUT_WORKSPACES, margin_of

LOW = (
    "gernet_l", "repvgg_b1", "repvgg_b1g4", "repvgg_b2", "repvgg_b2g4", "repvgg_b3g4", "vgg13", "vgg16", "vgg16_bn",
    "efficientnet_el", "legacy_seresnet18", "legacy_seresnet50", "regnety_016", "regnetx_064", "resnet50_clip",
)  # fmt: skip
"""Nets that are predicted too low in proportion to the batch."""
RIGHT = (
    "resnet18d", "resnet34d", "resnet50d", "wide_resnet50_2", "mobilenetv2_100", "densenetblur121d", "regnety_008",
    "regnetx_008", "mobileone_s3", "ese_vovnet39b", "repvgg_a1", "repvgg_a2", "nf_ecaresnet26", "skresnet18", "vgg11",
)  # fmt: skip
"""Nets of the same operators that are predicted right."""
SAMPLE = 200
"""Nets whose readings show no trials of cuDNN, for the tables by effect."""
NEAR_LIMIT = 37_000
"""MiB from which a run is left out: there the allocator gives its cache back."""
EFFECTS = (0.02, 0.05, 0.1)


def none(_: Pass) -> float:
    """No workspace."""
    return 0


def copies(one_pass: Pass) -> float:
    """memfit's rule: channels-last copies of all three tensors around both gradients."""
    return sum(one_pass.tensors) if one_pass.copies else 0


def _spatial(one_pass: Pass) -> bool:
    depthwise = one_pass.groups > 1 and one_pass.groups == one_pass.x[1]
    return max(one_pass.weight[2:]) > 1 and not depthwise


def _or_copies(where: Any, rule: Rule) -> Rule:
    return lambda one_pass: rule(one_pass) if where(one_pass) else copies(one_pass)


def winograd(one_pass: Pass) -> float:
    """Bytes of the transforms of Winograd's F(4 x 4, 3 x 3), not fused: 36 numbers for each tile of 4 x 4."""
    tiles = math.prod(math.ceil(size / 4) for size in one_pass.out[2:])
    channels = one_pass.x[1] + one_pass.out[1]
    return 4 * 36 * (one_pass.x[0] * tiles * channels + math.prod(one_pass.weight[:2]))


def fourier(one_pass: Pass) -> float:
    """Bytes of the transforms in tiles of 32 x 32: 32 x 17 complex numbers each."""
    tiles = math.prod(math.ceil(size / (33 - kernel)) for size, kernel in _sizes(one_pass))
    channels = one_pass.x[1] + one_pass.out[1]
    return 8 * 32 * 17 * (one_pass.x[0] * tiles * channels + math.prod(one_pass.weight[:2]))


def _sizes(one_pass: Pass) -> list[tuple[int, int]]:
    return list(zip(one_pass.out[2:], one_pass.weight[2:], strict=True))


def _three_by_three(one_pass: Pass) -> bool:
    plain = set(one_pass.stride) == {1} and set(one_pass.dilation) == {1}
    return plain and one_pass.weight[2:] == (3, 3) and _spatial(one_pass)


def _gradient(one_pass: Pass) -> bool:
    return one_pass.kind != "forward"


def _weight_more(mib: float) -> Rule:
    """Copies, and so many MiB more around the gradient of the weight, which is made after that of the input.

    A workspace that is a little larger than the block which the one before it left is allocated beside it.
    """
    return lambda c: copies(c) + (mib * MIB if c.kind == "weight" and c.copies else 0)


MORE = "copies, 4 MiB more around the weight's gradient"
RULES: dict[str, Rule] = {
    "none": none,
    "copies around both gradients (memfit)": copies,
    "copies, in the forward too": lambda c: sum(c.tensors) if _spatial(c) else 0,
    "copies; in the forward of input and weight": _or_copies(
        lambda c: c.kind == "forward" and _spatial(c), lambda c: c.tensors[0] + c.tensors[1]
    ),
    "copies; none of the input's gradient": _or_copies(
        lambda c: c.kind == "input" and c.copies, lambda c: c.tensors[1] + c.tensors[2]
    ),
    "copies, of 1 x 1 too": lambda c: sum(c.tensors) if _gradient(c) and c.groups == 1 else copies(c),
    "Winograd, both gradients": _or_copies(lambda c: _three_by_three(c) and _gradient(c), winograd),
    "Winograd, input's gradient": _or_copies(lambda c: _three_by_three(c) and c.kind == "input", winograd),
    "Winograd, weight's gradient": _or_copies(lambda c: _three_by_three(c) and c.kind == "weight", winograd),
    "Winograd, both, up to 128 channels": _or_copies(
        lambda c: _three_by_three(c) and _gradient(c) and max(c.weight[:2]) <= 128, winograd
    ),
    "Winograd, both, from 128 channels": _or_copies(
        lambda c: _three_by_three(c) and _gradient(c) and min(c.weight[:2]) >= 128, winograd
    ),
    "Fourier, both gradients": _or_copies(lambda c: _three_by_three(c) and _gradient(c), fourier),
    "twice the copies": lambda c: 2 * copies(c),
    "twice, input's gradient": lambda c: (2 if c.kind == "input" else 1) * copies(c),
    "twice, weight's gradient": lambda c: (2 if c.kind == "weight" else 1) * copies(c),
    # Written after a look at the errors, and without a source:
    "copies, 1 MiB more around the weight's gradient": _weight_more(1),
    MORE: _weight_more(4),
    "twice, outputs from 512 MiB": lambda c: (2 if c.tensors[2] >= 512 * MIB else 1) * copies(c),
}


def predictions(model: str, runs: Sequence[Run], rules: dict[str, Rule]) -> list[dict[str, Any]]:
    """A net's runs, each with MiB by rule and with the interval of memfit's rule."""
    traces = trace_passes(model)
    card = with_memory(find_device(DEVICE), 1 << 50)
    answer = []
    for run in runs:
        by_rule = {
            name: footprint_on(traces.at(run.batch, rule), card, torch_version=TORCH).phases["train"]
            for name, rule in rules.items()
        }
        process = {name: (train.reserved_bytes + context_bytes()) / MIB for name, train in by_rule.items()}
        margin = margin_of(traces.small.net_kind)
        own = process["copies around both gradients (memfit)"]
        above = process["twice the copies"] * (1 + margin_of(WITHOUT_WORKSPACES).high)
        if max(own, run.measured_mib) > NEAR_LIMIT:
            continue
        answer.append(
            {
                "model": model, "batch": run.batch, "fitting_half": is_fitting_half(model),
                "measured_mib": run.measured_mib, "low": own * (1 + margin.low), "margin_high": own * (1 + margin.high),
                "high": max(own * (1 + margin.high), above), "mib": process,
                "effect": process["twice the copies"] / own - 1,
            }
        )  # fmt: skip
    return answer


def errors(rows: Sequence[dict[str, Any]], rule: str) -> dict[str, float]:
    """Relative errors of a rule's predictions; ``shift``: the median with its sign, below 0 where too low."""
    relative = np.array([row["mib"][rule] / row["measured_mib"] - 1 for row in rows])
    sizes = np.abs(relative)
    return {
        "runs": len(rows), "median": float(np.median(sizes)), "p90": float(np.percentile(sizes, 90)),
        "p95": float(np.percentile(sizes, 95)), "shift": float(np.median(relative)),
    }  # fmt: skip


def by_effect(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Coverage of the interval by the effect of twice the workspaces, without and with the replay of these."""
    answer = []
    for low, high in zip((-math.inf, *EFFECTS), (*EFFECTS, math.inf), strict=True):
        for half in (True, False):
            some = [row for row in rows if low <= row["effect"] < high and row["fitting_half"] == half]
            if not some:
                continue
            inside = [row["low"] <= row["measured_mib"] for row in some]
            answer.append(
                {
                    "effect_from": None if low == -math.inf else low, "effect_to": None if high == math.inf else high,
                    "fitting_half": half, "runs": len(some), "nets": len({row["model"] for row in some}),
                    "margin_alone": _part(inside, [row["measured_mib"] <= row["margin_high"] for row in some]),
                    "with_twice": _part(inside, [row["measured_mib"] <= row["high"] for row in some]),
                    **errors(some, "copies around both gradients (memfit)"),
                }
            )  # fmt: skip
    return answer


def _part(above_low: Sequence[bool], below_high: Sequence[bool]) -> float:
    return sum(map(lambda low, high: low and high, above_low, below_high)) / len(above_low)


def _line(row: dict[str, Any], rules: Iterable[str]) -> list[Any]:
    """model, batch, measured MiB, low, high by the margin alone, high, effect, predicted MiB by rule."""
    bounds = [round(row[key]) for key in ("low", "margin_high", "high")]
    predicted = [round(row["mib"][name]) for name in rules]
    return [row["model"], row["batch"], row["measured_mib"], *bounds, round(row["effect"], 4), *predicted]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--sample", type=int, default=SAMPLE, help="nets of the fair sample; default: %(default)s")
    given = parser.parse_args()
    install_timm()
    torch.set_num_threads(1)
    ran = [run for run in read_table(PUBLIC) if run.label == "ran"]
    smooth = {run.model for run in regular(ran)}
    sample = [name for name in models_in_order(ran) if name in smooth][: given.sample]
    few = {name: RULES[name] for name in ("copies around both gradients (memfit)", "twice the copies", MORE)}
    rows = []
    for number, model in enumerate(dict.fromkeys((*LOW, *RIGHT, *sample))):
        rules = RULES if model in (*LOW, *RIGHT) else few
        rows += predictions(model, [run for run in ran if run.model == model], rules)
        print(f"{number + 1}: {model}", flush=True)
    low, right, sampled = ([row for row in rows if row["model"] in names] for names in (LOW, RIGHT, sample))
    figures = {
        "low_nets": LOW, "right_nets": RIGHT, "sampled_nets": sample,
        "rules": [{"rule": name, "low": errors(low, name), "right": errors(right, name)} for name in RULES],
        "rules_sampled": [{"rule": name, **errors(sampled, name)} for name in few],
        "by_effect": by_effect(rows),
        "by_effect_sampled": by_effect(sampled),
        "rows": [_line(row, few) for row in rows],
    }  # fmt: skip
    write_result(target(given.json, complete=given.sample == SAMPLE), figures, packages=())


if __name__ == "__main__":
    main()
