"""pytest tests/show/test_sample_strips.py"""

from memfit.audit import audit
from memfit.batch import LengthBatchSampler
from memfit.show.sample_strips import strips


def drawn(target, world, columns=8):
    return [line.plain for line in strips(audit(target, [world]).picture(world, columns))]


def test_halves_of_the_ids_fill_halves_of_the_strips() -> None:
    lines = drawn(lambda rank, world: [list(range(rank * 32, rank * 32 + 64 // world))], 2)
    assert lines == [
        "2 ranks: ids 0 to 63, from left to right",
        "rank 0  ████    ",
        "rank 1      ████",
        "all     ████████",
    ]


def test_double_sharding_leaves_all_at_half_height() -> None:
    lines = drawn(lambda rank, world: [list(range(rank, 64, world**2))], 2)
    assert lines[1:] == ["rank 0  ▂▂▂▂▂▂▂▂", "rank 1  ▂▂▂▂▂▂▂▂", "all     ▄▄▄▄▄▄▄▄"]


def test_lengths_and_padding_over_time() -> None:
    lines = drawn(lambda rank, world: LengthBatchSampler([10] * 8 + [5] * 8, 40, rank=rank, world=world), 2)
    assert lines[4] == "steps 0 to 1: mean length (full: 10), then padding (full: all)"
    assert lines[5] in ("len 0   █▄", "len 0   ▄█")
    assert lines[6] == "pad 0     "


def test_many_ranks_are_cut_and_every_line_fits() -> None:
    lines = drawn(lambda rank, world: [[rank]], 20, 64)
    assert "        … and 12 more ranks" in lines
    assert max(map(len, lines)) <= 80
