"""What a rank has drawn comes back from its process as it was."""

import dataclasses

import numpy as np
import pytest

from memfit.audit.drawn_json import drawn_from_json, drawn_to_json
from memfit.audit.ids import Batch
from memfit.audit.loader_parts import Declared
from memfit.audit.observe import Drawn


@pytest.mark.parametrize("steps", [None, (1, 2)])
def test_ids_lengths_and_what_is_declared(steps):
    batches = (Batch(ids=(3, "ö"), lengths=(0.5, 2.0)), Batch(ids=("content 12",)))
    declared = Declared(size=4, lengths=np.array([1.0, 2.5]), dropped=(1, 3), batch_size=2)
    drawn = Drawn(rank=1, batches=batches, epochs=(0, 1), steps=steps, declared=declared, once=True)
    back = drawn_from_json(drawn_to_json(drawn))
    assert back.declared.lengths.tolist() == [1.0, 2.5]
    plain = dataclasses.replace(declared, lengths=None)
    assert dataclasses.replace(back, declared=plain) == dataclasses.replace(drawn, declared=plain)
    assert dataclasses.replace(back.declared, lengths=None) == plain


def test_an_id_that_json_has_not_is_text():
    drawn = Drawn(rank=0, batches=(Batch(ids=((1, 2),)),), epochs=())
    assert drawn_from_json(drawn_to_json(drawn)).batches[0].ids == ("(1, 2)",)
