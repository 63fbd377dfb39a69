"""The catalogue of cards: every card there, every figure sourced, nothing unknown shown as a number."""

import pytest

from memfit.device.hardware.catalogue import Device, catalogue, figures, find_device, with_memory
from memfit.errors import InputError

GIB, MIB = 1 << 30, 1 << 20
CARDS = (
    "t4",
    "rtx3090",
    "rtx4090",
    "rtx5090",
    "quadro-rtx6000",
    "l40s",
    "a100-40gb",
    "a100-80gb",
    "h100",
    "h20",
    "h200",
)
FIGURES = ("memory_bytes", "bf16_flops", "fp16_flops", "tf32_flops", "fp32_flops", "bandwidth", "link_bytes")


def test_the_cards_that_the_design_names_are_there() -> None:
    assert tuple(catalogue()) == (*CARDS, "cpu")


@pytest.mark.parametrize("key", CARDS)
def test_every_known_figure_has_a_source(key: str) -> None:
    card = find_device(key)
    for name in (*FIGURES, "usable_bytes", "context_bytes"):
        assert (getattr(card, name) is None) == (name not in card.sources), name
    assert not any(value == 0 for value in figures(card).values())


@pytest.mark.parametrize(
    ("key", "nominal"),
    [("t4", 16), ("rtx3090", 24), ("rtx4090", 24), ("rtx5090", 32), ("quadro-rtx6000", 24), ("l40s", 48),
     ("a100-40gb", 40), ("a100-80gb", 80), ("h100", 80), ("h20", 96), ("h200", 141)],
)  # fmt: skip
def test_cuda_reports_a_little_less_than_the_nominal_memory(key: str, nominal: int) -> None:
    card = find_device(key)
    assert card.memory_bytes is not None
    assert card.usable_bytes == card.memory_bytes - 16 * MIB
    assert 0.90 * nominal * GIB < card.memory_bytes < nominal * GIB


def test_turing_has_neither_bf16_nor_tf32_tensor_cores() -> None:
    for key in ("t4", "quadro-rtx6000"):
        assert (find_device(key).bf16_flops, find_device(key).tf32_flops) == (None, None)


@pytest.mark.parametrize("key", CARDS)
def test_rates_and_the_context_are_ordered(key: str) -> None:
    card = find_device(key)
    assert card.fp16_flops is not None
    assert card.fp32_flops is not None
    assert card.fp32_flops < card.fp16_flops
    assert card.bf16_flops in (None, card.fp16_flops)
    assert card.context_low is not None
    assert card.context_bytes is not None
    assert card.context_high is not None
    assert 100 * MIB < card.context_low <= card.context_bytes <= card.context_high < GIB


@pytest.mark.parametrize(
    ("key", "nbytes"), [("a100-80gb", 8_519_680), ("rtx4090", 8_519_680), ("h100", 32 * MIB), ("rtx5090", 32 * MIB)]
)
def test_cublas_workspaces_are_larger_from_hopper_on(key: str, nbytes: int) -> None:
    assert find_device(key).cublas_workspace_bytes == nbytes


def test_an_unknown_device_names_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"^device 'RTX-409': not one of t4, .*, cpu; write rtx4090$"):
        find_device("RTX-409")


def test_with_memory_replaces_the_memory_and_keeps_the_card() -> None:
    card = with_memory(find_device("rtx4090"), 20 * GIB)
    assert (card.memory_bytes, card.usable_bytes, card.key) == (20 * GIB, 20 * GIB, "rtx4090")
    assert card.bandwidth == find_device("rtx4090").bandwidth
    assert card.sources["memory_bytes"] == "given"
    assert find_device("rtx4090").memory_bytes == 25_250_627_584, "the catalogue is as it was"


def test_the_cpu_is_a_device_without_cuda_figures() -> None:
    cpu = find_device("cpu")
    assert not cpu.is_cuda
    assert (cpu.memory_bytes, cpu.context_bytes, cpu.cublas_workspace_bytes) == (None, None, None)


def test_a_device_is_plain_data_for_json() -> None:
    assert figures(Device(key="x", name="X"))["memory_bytes"] is None
