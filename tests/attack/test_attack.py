"""Runs that are killed, stopped, starved and damaged by chance, and resumed; see bench/attack.py.

python -m pytest tests/attack/test_attack.py -m slow
"""

import contextlib

import pytest

from testing import attacker
from testing.attacker import DAMAGES, DISTURBANCES, KINDS, Attacker, Case, Launch, draw_case
from testing.small_disk import CannotMountError, Disk


def test_cases_are_the_same_for_the_same_seed_and_reach_everything():
    cases = [draw_case(1, number) for number in range(300)]
    assert cases == [draw_case(1, number) for number in range(300)]
    launches = [launch for case in cases for launch in case.launches]
    assert {case.kind for case in cases} == set(KINDS)
    assert {launch.disturbance for launch in launches} == set(DISTURBANCES)
    assert {launch.damage for launch in launches} == set(DAMAGES)


@contextlib.contextmanager
def skipped_where_nothing_can_be_mounted():
    try:
        yield
    except CannotMountError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("disturbance", attacker.DISK_DISTURBANCES)
def test_a_disk_that_cannot_be_mounted_is_not_counted_as_spoiled(tmp_path, monkeypatch, disturbance):
    monkeypatch.setattr(attacker, "small_disk", lambda path: contextlib.nullcontext(Disk(path, mounted=False)))
    monkeypatch.setattr(Attacker, "_undisturbed", lambda attacker, kind: (tmp_path, tmp_path, 1.0))
    launch = Launch(disturbance=disturbance, after=0.8, damage="nothing")
    with pytest.raises(CannotMountError):
        Attacker(tmp_path).attack(Case(number=0, kind="plain", launches=[launch]))


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_every_disturbance(tmp_path, disturbance):
    launch = Launch(disturbance=disturbance, after=0.8, damage="checkpoint byte")
    with skipped_where_nothing_can_be_mounted():
        Attacker(tmp_path).attack(Case(number=0, kind="average", launches=[launch]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(tmp_path, kind):
    attacker = Attacker(tmp_path)
    for number in range(2):
        with skipped_where_nothing_can_be_mounted():
            attacker.attack(draw_case(20, number, (kind,)))
