"""Communication's time: the ring's formulas in numbers that can be done by hand."""

import pytest

from memfit.device.hardware.catalogue import catalogue, find_device, interconnect_of, interconnects
from memfit.errors import InputError
from memfit.planner.timing.communication import communication_seconds, window_volume

GIB = 1 << 30


def seconds(engine, world, **how):
    ring = interconnects()["pcie4"]
    steps = window_volume(engine, GIB, **how).collectives * (world - 1) * ring.step_seconds
    return (communication_seconds(engine, GIB, world, ring, **how) - steps) * ring.bytes / GIB


def test_one_rank_tells_nobody():
    for engine in ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3"):
        assert communication_seconds(engine, GIB, 1, interconnects()["nvlink4"]) == 0


@pytest.mark.parametrize(
    ("engine", "micro_batches", "times_the_parameters"),
    [("ddp", 1, 2), ("ddp", 4, 2), ("zero1", 4, 2), ("zero2", 1, 2), ("zero2", 4, 5), ("fsdp2", 1, 3), ("fsdp2", 4, 9),
     ("zero3", 1, 3), ("zero3", 4, 12)],
)  # fmt: skip
def test_what_a_rank_sends_in_a_window(engine, micro_batches, times_the_parameters):
    assert seconds(engine, 4, micro_batches=micro_batches) == pytest.approx(times_the_parameters * 3 / 4)


def test_syncing_each_micro_batch_costs_a_reduction_each():
    assert seconds("ddp", 2, micro_batches=4, sync_each_micro_batch=True) == pytest.approx(8 / 2)
    assert seconds("fsdp2", 2, micro_batches=4, sync_each_micro_batch=True) == pytest.approx(12 / 2)


def test_what_each_shard_scattered_is_summed_over_the_replicas():
    ring = interconnects()["pcie4"]
    one, three = (communication_seconds("fsdp2", GIB, 4, ring, units=10, replicas=count) for count in (1, 3))
    assert three - one == pytest.approx(2 * (GIB / 4) * (2 / 3) / ring.bytes + 10 * 2 * 2 * ring.step_seconds)


def test_steps_count_where_units_are_small():
    ring = interconnects()["ethernet-100g"]
    few, many = (communication_seconds("fsdp2", GIB, 1024, ring, units=units) for units in (1, 101))
    assert many - few == pytest.approx(100 * 3 * 1023 * 14e-6)


def test_every_card_has_an_interconnect_of_its_own_rate():
    for key, card in catalogue().items():
        if key != "cpu":
            link = interconnect_of(card)
            assert link is not None
            assert link.bytes == card.link_bytes
    assert interconnect_of(find_device("cpu")) is None


def test_every_figure_has_a_source():
    for interconnect in interconnects().values():
        assert set(interconnect.sources) == {"bytes", "step_seconds"}
        assert all(interconnect.sources.values())


def test_an_engine_that_is_not_priced_is_refused_by_name():
    with pytest.raises(InputError, match="fsdp1"):
        window_volume("fsdp1", GIB)
