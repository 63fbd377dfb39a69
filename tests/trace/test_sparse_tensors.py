"""Sparse gradients and products allocate in a trace what torch's kernels do in a real run."""

import gc
from itertools import accumulate

import pytest
import torch
from torch import nn

from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.errors import InputError
from memfit.events import ALLOCATE
from memfit.trace.tracer import Tracer
from tests.trace.test_gradient_accumulation import of_real_run

ROWS, WIDTH, ENTRIES = 600, 16, 256
SOME_BYTES = 64
"""Single numbers, of which a trace has some fewer."""


def rows(different: int = ENTRIES) -> torch.Tensor:
    return torch.arange(ENTRIES) % different


def trained(make, forward, kind=nn.Embedding, steps=2, **options):
    """Steps of an optimizer of sparse gradients; two of them keep what the first one made."""
    table = kind(ROWS, WIDTH, sparse=True, **options)
    optimizer = make(list(table.parameters()))
    for _ in range(steps):
        forward(table).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def squares(table):
    return table(rows(100)).square()


def graph():
    edges = torch.stack([torch.arange(ENTRIES), (torch.arange(ENTRIES) * 7) % ENTRIES])
    return torch.sparse_coo_tensor(edges, torch.ones(ENTRIES), (ENTRIES, ENTRIES), check_invariants=False)


class SparseCase:
    def sparse_adam():
        trained(torch.optim.SparseAdam, squares)

    def adagrad():
        trained(lambda tables: torch.optim.Adagrad(tables, lr=0.1), squares)

    def sgd():
        trained(lambda tables: torch.optim.SGD(tables, lr=0.1), squares)

    def momentum():
        trained(
            lambda tables: torch.optim.SGD(tables, lr=0.1, momentum=0.9), lambda table: table(rows()).square(), steps=1
        )

    def a_table_that_is_read_twice():
        trained(torch.optim.SparseAdam, lambda table: table(rows()).square() + table(rows() + ENTRIES).square())

    def micro_batches():
        def forward(table):
            table(rows()).square().sum().backward()
            return table(rows() + ENTRIES).square()

        trained(torch.optim.SparseAdam, forward)

    def an_expanded_gradient():
        trained(torch.optim.SparseAdam, lambda table: table(rows(100)))

    def bags():
        trained(torch.optim.SparseAdam, lambda bags: bags(rows(100).view(-1, 4)).square(), nn.EmbeddingBag, mode="mean")

    def dense_of_sparse():
        table = nn.Embedding(ROWS, WIDTH, sparse=True)
        squares(table).sum().backward()
        table.weight.grad.to_dense()

    def product():
        x = nn.Parameter(torch.empty(ENTRIES, WIDTH).fill_(0.1))
        torch.sparse.mm(graph(), x).square().sum().backward()

    def sum_of_a_product():
        x = nn.Parameter(torch.empty(ENTRIES, WIDTH).fill_(0.1))
        torch.addmm(torch.zeros(ENTRIES, WIDTH), graph(), x).square().sum().backward()


CASES = {name: case for name, case in vars(SparseCase).items() if callable(case) and name[0] != "_"}


def alive(tracer):
    """Bytes after each event."""
    signs = [1 if kind == ALLOCATE else -1 for kind in tracer.kind]
    return list(accumulate(sign * tracer.nbytes[i] for sign, i in zip(signs, tracer.storage, strict=True)))


def traced(enter, run):
    with enter() as virtual, torch.device(virtual.device):
        gc.collect()
        with Tracer(virtual).recording() as seen:
            run()
    return seen


@pytest.mark.parametrize("name", CASES)
def test_the_most_bytes_are_those_of_a_real_run(name):
    real = max(accumulate(of_real_run(CASES[name])))
    assert max(alive(traced(virtual_cpu, CASES[name]))) == pytest.approx(real, abs=SOME_BYTES)


def test_a_card_sorts_the_indices_and_keeps_the_values_of_those_that_differ():
    def run():
        table = nn.Embedding(ROWS, WIDTH, sparse=True)
        squares(table).sum().backward()
        assert table.weight.grad.coalesce()._nnz() == 100

    seen = traced(lambda: virtual_gpu(CardRules()), run)
    made = [seen.nbytes[i] for kind, i in zip(seen.kind, seen.storage, strict=True) if kind == ALLOCATE]
    flattened, places, sorting = 8 * ENTRIES, 2 * 8 * ENTRIES, 2 * 8 * ENTRIES
    assert made[-4:] == [flattened, places, sorting, 100 * WIDTH * 4]


def test_a_momentum_of_sparse_gradients_grows_and_the_answer_says_so():
    seen = traced(virtual_cpu, lambda: trained(lambda tables: torch.optim.SGD(tables, lr=0.1, momentum=0.9), squares))
    doubtful = [assumption for assumption in seen.virtual.assumptions if assumption.doubtful]
    assert [(each.operator, each.answer) for each in doubtful] == [
        ("a sum of sparse tensors", "more entries in each step")
    ]


def test_an_operator_without_a_rule_is_refused_by_its_name():
    with pytest.raises(InputError, match=r"aten::log1p_ of a sparse tensor.*no rule says what it allocates"):
        traced(virtual_cpu, lambda: graph_of_fakes().log1p_())


def graph_of_fakes():
    return torch.sparse_coo_tensor(torch.ones(2, 4, dtype=torch.int64), torch.empty(4), (8, 8), check_invariants=False)
