"""The catalogue of cards: every card there, every figure sourced, nothing unknown shown as a number."""

from pathlib import Path

import pytest

from memfit.device.hardware.catalogue import (
    Device,
    catalogue,
    figures,
    find_device,
    mig_slices,
    read_cards,
    with_memory,
    with_torch,
)  # fmt: skip
from memfit.errors import InputError
from memfit.installation import release_number

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
    "v100-16gb",
    "v100-32gb",
    "rtx2080ti",
    "rtx3060",
    "rtx3080",
    "rtx3090ti",
    "rtx4060",
    "rtx4060ti-16gb",
    "rtx4070ti-super",
    "rtx4080",
    "rtx5060ti-16gb",
    "rtx5070ti",
    "rtx5080",
    "a10",
    "a10g",
    "a30",
    "a6000",
    "l4",
    "h100-pcie",
    "h100-nvl",
    "b200",
    "mi300x",
)
FIGURES = ("memory_bytes", "bf16_flops", "fp16_flops", "tf32_flops", "fp32_flops", "bandwidth", "link_bytes")


def test_the_cards_that_the_design_names_are_there() -> None:
    assert tuple(catalogue()) == (*CARDS, "cpu")


@pytest.mark.parametrize("key", CARDS)
def test_every_known_figure_has_a_source(key: str) -> None:
    card = find_device(key)
    for name in (*FIGURES, "usable_bytes", "context_bytes"):
        assert (getattr(card, name) is None) == (name not in card.sources), name
    assert not any(value == 0 and value is not False for value in figures(card).values())


@pytest.mark.parametrize(
    ("key", "nominal"),
    [("t4", 16), ("rtx3090", 24), ("rtx4090", 24), ("rtx5090", 32), ("quadro-rtx6000", 24), ("l40s", 48),
     ("a100-40gb", 40), ("a100-80gb", 80), ("h100", 80), ("h20", 96), ("h200", 141), ("v100-16gb", 16),
     ("v100-32gb", 32), ("rtx2080ti", 11), ("rtx3060", 12), ("rtx3080", 10), ("rtx3090ti", 24), ("rtx4060", 8),
     ("rtx4060ti-16gb", 16), ("rtx4070ti-super", 16), ("rtx4080", 16), ("rtx5060ti-16gb", 16), ("rtx5070ti", 16),
     ("rtx5080", 16), ("a10", 24), ("a10g", 24), ("a30", 24), ("a6000", 48), ("l4", 24), ("h100-pcie", 80),
     ("h100-nvl", 94), ("b200", 180), ("mi300x", 192)],
)  # fmt: skip
def test_cuda_reports_a_little_less_than_the_nominal_memory(key: str, nominal: int) -> None:
    card = find_device(key)
    assert card.memory_bytes is not None
    assert card.usable_bytes == card.memory_bytes - 16 * MIB
    assert 0.90 * nominal * GIB < card.memory_bytes < nominal * GIB


def test_turing_has_neither_bf16_nor_tf32_tensor_cores() -> None:
    for key in ("t4", "quadro-rtx6000", "rtx2080ti", "v100-16gb", "v100-32gb"):
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
    ("key", "held"),
    [
        ("rtx3060", 11.66 - 11.37 - 174.05 / 1024), ("rtx3060", 11.68 - 11.37 - 211.54 / 1024),
        ("rtx4060", 7.46 - 7.13 - 222.83 / 1024), ("l4", 21.96 - 21.65 - 66.83 / 1024),
        ("rtx2080ti", 10.69 - 10.48 - 29.33 / 1024), ("a6000", 43.35 - 14.48 - 28.52),
        ("v100-32gb", 31.72 - 29.66 - 1.68), ("v100-16gb", 15.75 - 14.89 - 497.13 / 1024),
        ("a10g", 22.04 - 21.75 - 15.17 / 1024), ("b200", 168.34 - 167.64 - 4.62 / 1024),
    ],
)  # fmt: skip
def test_a_context_holds_what_messages_of_the_card_leave_beside_the_allocator(key: str, held: float) -> None:
    """Bytes in use less allocated less reserved but unallocated, in GiB of two decimals each."""
    context = find_device(key).context_bytes
    assert context is not None
    assert context == pytest.approx(held * GIB, abs=0.02 * GIB)


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


def test_a_slice_has_its_own_memory_and_its_part_of_the_rates() -> None:
    card, part = find_device("a100-40gb"), find_device("A100-40GB:3g.20gb")
    assert (part.key, part.multiprocessors, part.memory_bytes) == ("a100-40gb:3g.20gb", 42, int(19.5 * GIB))
    assert part.usable_bytes == int(19.5 * GIB) - 16 * MIB
    assert card.fp16_flops is not None
    assert part.fp16_flops == pytest.approx(card.fp16_flops * 42 / 108)
    assert (part.link, part.compute_capability) == (None, (8, 0))


def test_an_a30_has_slices_too() -> None:
    card, part = find_device("a30"), find_device("a30:1g.6gb")
    assert part.memory_bytes == int(5.81 * GIB)
    assert card.multiprocessors == 4 * part.multiprocessors
    assert card.bandwidth == 4 * part.bandwidth


@pytest.mark.parametrize(
    ("name", "gib", "multiprocessors"),
    [
        ("h100-pcie:3g.40gb", 39.25, 46),
        ("h100-nvl:2g.24gb", 21.5, 32),
        ("h200:1g.18gb", 16, 16),
        ("b200:2g.45gb", 44.25, 36),
    ],
)
def test_hopper_and_blackwell_cards_have_slices(name: str, gib: float, multiprocessors: int) -> None:
    part = find_device(name)
    assert (part.memory_bytes, part.multiprocessors) == (int(gib * GIB), multiprocessors)
    assert "-lgip" in part.sources["memory_bytes"]


def test_no_slice_is_larger_than_its_part_of_the_card() -> None:
    for card in catalogue().values():
        for profile, part in mig_slices(card).items():
            eighths = round(8 * part.bandwidth / card.bandwidth)
            assert 0.9 < part.memory_bytes / (card.memory_bytes * eighths / 8) < 1, (card.key, profile)
            assert part.multiprocessors < card.multiprocessors, (card.key, profile)


def test_an_unknown_slice_names_those_that_are_known() -> None:
    with pytest.raises(InputError, match=r"slice '2g' of a100-40gb: no such profile; write 1g.5gb or "):
        find_device("a100-40gb:2g")
    with pytest.raises(InputError, match="no slices of rtx4090 are known"):
        find_device("rtx4090:1g.5gb")


OWN = """[my-card]
name = "My Card"
compute_capability = [8, 6]
memory_bytes = 12884901888
bandwidth = { value = 4e11, source = "its box" }
"""


def test_an_added_card_is_in_the_catalogue_and_says_who_gave_its_figures(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "my-card" not in catalogue()
    (tmp_path / "memfit").mkdir()
    (tmp_path / "memfit" / "devices.toml").write_text(OWN)
    card = find_device("My-Card")
    assert (card.memory_bytes, card.bandwidth, card.fp16_flops) == (12 * GIB, 4e11, None)
    assert (card.sources["memory_bytes"], card.sources["bandwidth"]) == ("added by you", "its box")
    assert list(catalogue())[-2:] == ["my-card", "cpu"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x", "x.toml"),
        ("", "no table of a card"),
        (OWN.replace("my-card", "rtx4090"), "the catalogue has a device of that name"),
        (OWN.replace("memory_bytes = 12884901888\n", ""), r"\[my-card\] of x.toml: no memory_bytes"),
        (OWN.replace("12884901888", "-1"), "memory_bytes = -1 .* not a number above 0"),
        (OWN.replace("bandwidth", "bandwith"), "bandwith .*: no figure of a card; write bandwidth"),
        (OWN + "context_by_torch = 5\n", r'context_by_torch = 5 .*: not { "2.2" = \[low, usual, high\] }'),
        (OWN + 'context_by_torch."2.2" = [3, 2, 1]\n', "context_by_torch = .* not {"),
        (OWN + "context_by_torch.new = [1, 2, 3]\n", "context_by_torch = .* not {"),
        (OWN.replace("[8, 6]", '"8.6"'), r"not \[major, minor\]"),
    ],
)
def test_a_file_that_is_no_card_s_is_refused(tmp_path, text, message) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_cards(path)


def test_a_context_is_that_of_the_version_of_torch() -> None:
    card = find_device("rtx3090")
    assert [each.since for each in card.context_by_torch] == ["1.0", "1.13", "2.1", "2.2"]
    eager, lazy = with_torch(card, "1.12.1"), with_torch(card, "2.1.2+cu121")
    assert (eager.context_low, eager.context_bytes, eager.context_high) == (1488 * MIB, 1643 * MIB, 1966 * MIB)
    assert lazy.context_bytes == pytest.approx(310 * MIB, rel=0.02), "messages of 308, 310 and 312 MiB"
    assert with_torch(card, "2.13.0") == with_torch(card, "2.2.0") == card, "the installed version's is the newest"
    assert (eager.sources["context_bytes"][:12], lazy.sources["context_bytes"][:12]) == ("torch 1.0 on", "torch 2.1 on")
    assert with_torch(find_device("rtx3060"), "2.1.0") == find_device("rtx3060")


@pytest.mark.parametrize("key", CARDS)
def test_a_context_by_torch_is_ordered_and_has_a_source(key: str) -> None:
    rows = find_device(key).context_by_torch
    assert [each.since for each in rows] == sorted((each.since for each in rows), key=release_number)
    for each in rows:
        assert 100 * MIB < each.low <= each.usual <= each.high
        assert each.source


def test_an_added_card_may_have_a_context_by_version_of_torch(tmp_path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f'{OWN}context_by_torch."2.0" = [{GIB}, {2 * GIB}, {3 * GIB}]\n')
    card = read_cards(path)["my-card"]
    assert (card.context_low, card.context_bytes, card.context_high) == (GIB, 2 * GIB, 3 * GIB)
    assert card.sources["context_bytes"] == "torch 2.0 on: added by you"


def test_a_device_file_that_never_ends_is_refused() -> None:
    with pytest.raises(InputError, match="not a file of text"):
        read_cards(Path("/dev/zero"))
