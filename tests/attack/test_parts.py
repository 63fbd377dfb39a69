"""A checkpoint in parts holds no code, and reading one runs none, whoever wrote it.

python -m pytest tests/attack/test_parts.py
"""

import copy
import json
import os
import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp

from memfit.apply.train_state import build
from memfit.engine.single import Single
from memfit.errors import InputError
from memfit.train.checkpoint.legacy_parts import METADATA
from memfit.train.checkpoint.parts_index import INDEX
from memfit.train.checkpoint.sharded_checkpoint import _state, load_sharded, save_sharded
from tests.engine.ranks import CPU
from tests.engine.zero_ranks import Nets, weights, window


class Poison:
    """Runs a command where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture(scope="module")
def trained():
    train_state = build(Nets(), CPU, Single())
    window(train_state)
    return train_state


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    save_sharded(trained, folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def legacy(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("legacy")
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(_state(trained), checkpoint_id=folder, no_dist=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def reader():
    return build(Nets(), CPU, Single())


def put(files, folder):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def equal(result, expected):
    for name, value in weights(expected).items():
        torch.testing.assert_close(weights(result)[name], value, rtol=0, atol=0)
    groups = [state.optimizers["net"].param_groups for state in (result, expected)]
    plain = [[{k: v for k, v in group.items() if k != "params"} for group in each] for each in groups]
    assert plain[0] == plain[1]
    assert result.schedules["net"].state_dict() == expected.schedules["net"].state_dict()


def test_parts_hold_no_pickle_and_come_back_bit_for_bit(trained, written, tmp_path):
    assert sorted(written) == [INDEX, "rank-00000.safetensors"]
    fresh = build(Nets(), CPU, Single())
    load_sharded(fresh, put(written, tmp_path))
    equal(fresh, trained)


def test_parts_that_torch_wrote_are_still_read(trained, legacy, tmp_path):
    assert METADATA in legacy
    fresh = build(Nets(), CPU, Single())
    load_sharded(fresh, put(legacy, tmp_path))
    equal(fresh, trained)


def test_a_poisoned_metadata_runs_nothing(reader, legacy, tmp_path):
    folder, mark = put(legacy, tmp_path / "parts"), tmp_path / "mark"
    (folder / METADATA).write_bytes(pickle.dumps(Poison(mark)))
    with pytest.raises(InputError, match=r"names posix.system, which no checkpoint does; none of its code was run"):
        load_sharded(reader, folder)
    assert not mark.exists()


def test_poison_within_real_metadata_runs_nothing(reader, legacy, tmp_path):
    folder, mark = put(legacy, tmp_path / "parts"), tmp_path / "mark"
    metadata = pickle.loads(legacy[METADATA])
    metadata.planner_data = Poison(mark)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match="none of its code was run"):
        load_sharded(reader, folder)
    assert not mark.exists()


def test_a_poisoned_value_beside_good_metadata_runs_nothing(trained, reader, tmp_path):
    folder, mark = tmp_path / "parts", tmp_path / "mark"
    state = _state(trained)
    state["schedules"]["net"]["gamma"] = Poison(mark)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    assert not mark.exists()
    with pytest.raises(InputError, match="cannot be read into this job: UnpicklingError"):
        load_sharded(reader, folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda index: index.update(memfit_parts=2), "not of version 1"),
        (lambda index: index.pop("values"), "damaged: KeyError"),
        (lambda index: first(index)["chunks"][0].update(file="../../../etc/passwd"), "not a file of parts"),
        (lambda index: first(index)["chunks"].clear(), "are not the whole tensor"),
        (lambda index: first(index)["chunks"][0].update(offsets=[99, 0]), "outside of its tensor"),
        (lambda index: first(index)["chunks"][0].update(sizes=[True, 4]), "not a list of sizes"),
        (lambda index: first(index).update(shape=[2**40, 2**40]), "are not the whole tensor"),
        (lambda index: first(index).update(dtype="load"), "'load' is not a dtype"),
        (lambda index: first(index)["chunks"][0].update(name="no such"), "KeyError"),
        (lambda index: index["tensors"].pop("nets.net.out.bias"), "Missing key"),
        (
            lambda index: index["values"].update({key: {"value": 7} for key in parameters_of(index)}),
            "cannot be read .* TypeError",
        ),
    ],
)
def test_an_index_that_says_what_no_checkpoint_says(reader, written, tmp_path, change, says):
    index = json.loads(written[INDEX])
    change(index)
    folder = put({**written, INDEX: json.dumps(index).encode()}, tmp_path)
    with pytest.raises(InputError, match=says):
        load_sharded(reader, folder)


def first(index):
    return index["tensors"]["nets.net.blocks.0.0.weight"]


def parameters_of(index):
    """Keys of the values that list an optimizer's parameters."""
    keys = [key for key in index["values"] if "param_groups" in key and key.endswith("params")]
    assert keys, list(index["values"])
    return keys


def test_a_value_that_needs_code_is_refused_when_it_is_saved(trained, tmp_path):
    state = copy.copy(trained)
    state.optimizers["net"].param_groups[0]["own"] = random.Random(0)
    try:
        with pytest.raises(InputError, match=r"param_groups\.0\.own: a random\.Random"):
            save_sharded(state, tmp_path)
    finally:
        del state.optimizers["net"].param_groups[0]["own"]


def test_a_disk_that_is_full_is_an_ordinary_error(trained, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_sharded(trained, tmp_path)


@pytest.mark.parametrize("kind", ["written", "legacy"])
def test_damaged_parts_are_read_or_refused_in_one_line(request, reader, tmp_path, kind):
    """Without the manifest's checksums, which would refuse them all."""
    files, chance = request.getfixturevalue(kind), random.Random(0)
    refused = 0
    for number in range(40):
        name = chance.choice(sorted(files))
        folder = put({**files, name: damaged(files[name], chance)}, tmp_path / str(number))
        said = refusal(lambda folder=folder: load_sharded(reader, folder))
        assert "\n" not in (said or "")
        refused += said is not None
    assert refused > 10


def refusal(act):
    try:
        act()
    except InputError as error:
        return str(error)


def damaged(content, chance):
    """Bytes changed, cut off, doubled or put in."""
    changed = bytearray(content)
    match chance.randrange(4):
        case 0:
            for _ in range(chance.randrange(1, 8)):
                changed[chance.randrange(min(len(changed), 4096))] = chance.randrange(256)
        case 1:
            del changed[chance.randrange(len(changed)) :]
        case 2:
            at = chance.randrange(len(changed))
            changed[at:at] = changed[at : at + chance.randrange(1, 64)]
        case 3:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)
