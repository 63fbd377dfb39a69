"""Rows that are selected by one value of integers after another: each value gets an equal share."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from memfit.device.virtual.value_masks import Walks
from memfit.device.virtual.virtual_device import Virtual, virtual_cpu
from memfit.trace.tracer import Tracer

TOKENS, EXPERTS, CHOSEN = 64, 8, 2


@pytest.fixture
def traced() -> Iterator[Virtual]:
    with virtual_cpu() as virtual, Tracer(virtual).recording():
        yield virtual


def chosen(experts: int = EXPERTS) -> Tensor:
    return torch.rand(TOKENS, experts).topk(CHOSEN).indices


def one_hot(ids: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(ids, EXPERTS).permute(2, 1, 0)


def scattered(ids: Tensor) -> Tensor:
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, ids, True)


ROWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "nonzero": lambda ids, e: (ids == e).nonzero(),
    "where": lambda ids, e: torch.where(ids == e)[0],
    "index": lambda ids, e: torch.rand(TOKENS, CHOSEN)[ids == e],
    "masked_select": lambda ids, e: torch.rand(TOKENS, CHOSEN).masked_select(ids == e),
    "flat": lambda ids, e: (ids.view(-1) == e).nonzero(),
    "tensor": lambda ids, e: (ids == torch.tensor(e)).nonzero(),
    "any": lambda ids, e: (ids == e).any(dim=-1, keepdim=True).squeeze(-1).nonzero(),
    "sum": lambda ids, e: ((ids == e).sum(-1) > 0).nonzero(),
    "product": lambda ids, e: ((ids == e) * (torch.rand(TOKENS, CHOSEN) > 0.1)).nonzero(),
    "arange": lambda ids, e: (ids[..., None] == torch.arange(EXPERTS)).unbind(-1)[e].nonzero(),
    "one_hot": lambda ids, e: torch.where(one_hot(ids)[e])[1],
    "one_hot_row": lambda ids, e: torch.where(one_hot(ids)[torch.tensor([e])].squeeze(0))[1],
    "scatter": lambda ids, e: scattered(ids)[:, e].nonzero(),
}


def again(traced: Virtual, walk: Callable[[], list[int]]) -> list[list[int]]:
    """The rows that a walk selects at first, and where its walk through values is known."""
    counts = []
    for _ in range(2):
        counts.append(walk())
        traced.assumptions.walks = Walks(assumed=traced.assumptions.walks.observed())
    return counts


@pytest.mark.parametrize("how", ROWS)
def test_each_value_of_a_walk_gets_an_equal_share(how: str, traced: Virtual) -> None:
    def walk() -> list[int]:
        ids = chosen()
        return [ROWS[how](ids, expert).shape[0] for expert in range(EXPERTS)]

    first, second = again(traced, walk)
    assert first in ([TOKENS] * EXPERTS, [TOKENS * CHOSEN] * EXPERTS)
    assert second == [TOKENS * CHOSEN // EXPERTS] * EXPERTS


def test_the_share_of_each_element_of_a_row_is_the_rows(traced: Virtual) -> None:
    def walk() -> list[int]:
        ids = torch.rand(TOKENS, EXPERTS).argmax(-1)
        return [torch.rand(TOKENS, 5).masked_select((ids == e)[:, None]).numel() for e in range(EXPERTS)]

    assert again(traced, walk)[1] == [TOKENS * 5 // EXPERTS] * EXPERTS


def test_a_selection_by_one_value_or_at_a_line_of_its_own_finds_all(traced: Virtual) -> None:
    for _ in range(3):
        ids = chosen()
        assert (ids == 3).nonzero().shape[0] == ids.numel()
        assert (ids == 4).nonzero().shape[0] == ids.numel()
    assert traced.assumptions.walks.observed() == {}


def test_a_function_that_two_lines_call_is_no_walk(traced: Virtual) -> None:
    def rows(ids: Tensor, value: int) -> Tensor:
        return (ids == value).nonzero()

    for _ in range(3):
        ids = chosen()
        rows(ids, 1)
        rows(ids, 0)
    assert traced.assumptions.walks.observed() == {}


def test_other_integers_are_not_shared(traced: Virtual) -> None:
    for expert in range(EXPERTS):
        (chosen() == expert).nonzero()
    ids = chosen()
    for expert in range(EXPERTS):
        (ids == expert).nonzero()
        ids.add_(0)
    assert traced.assumptions.walks.observed() == {}


def test_of_nets_with_more_and_with_fewer_experts_the_fewer_count(traced: Virtual) -> None:
    for experts in (8, 4, 8, 4):
        ids = chosen(experts)
        for expert in range(experts):
            (ids == expert).nonzero()
    assert list(traced.assumptions.walks.observed().values()) == [4]


def test_the_last_integers_whose_walk_a_trace_left_do_not_count(traced: Virtual) -> None:
    for experts in (8, 8, 3):
        ids = chosen()
        for expert in range(experts):
            (ids == expert).nonzero()
    assert list(traced.assumptions.walks.observed().values()) == [8]


def test_a_mask_that_was_written_to_finds_all(traced: Virtual) -> None:
    def walk() -> list[int]:
        ids, counts = chosen(), []
        for expert in range(EXPERTS):
            mask = ids == expert
            mask |= torch.rand(TOKENS, CHOSEN) > 0.5
            counts.append(mask.nonzero().shape[0])
        return counts

    assert again(traced, walk) == [[TOKENS * CHOSEN] * EXPERTS] * 2
    assert traced.assumptions.walks.observed() == {}


def test_all_values_together_have_each_element_once(traced: Virtual) -> None:
    gates = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen(), torch.rand(TOKENS, CHOSEN))
    assert (gates > 0).nonzero().shape == (TOKENS * CHOSEN, 2)


def test_experts_that_are_taken_to_have_tokens_are_known_by_number(traced: Virtual) -> None:
    hit = torch.greater(one_hot(chosen()).sum(dim=(-1, -2)), 0).nonzero()
    assert [int(expert[0]) for expert in hit] == list(range(EXPERTS))


def test_positions_are_known_of_few_elements(traced: Virtual) -> None:
    places = (torch.rand(3, 2) > 0.5).nonzero()
    assert [place.tolist() for place in places] == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
