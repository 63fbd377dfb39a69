"""What ranks do in tests/engine/test_mesh_engines.py: torchrun … -m tests.engine.mesh_ranks FOLDER MESH CASE…

A case is one of ``rank_steps``, STATES for checkpoints, REFUSALS, or FIRST for nets that are built without values.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.engine.factory import make_engine
from memfit.engine.process_group import join
from memfit.errors import InputError
from memfit.jobs.optimizers.scaled_adam import ScaledAdam
from memfit.mesh import parse_mesh
from memfit.train.checkpoint.sharded_checkpoint import load_sharded, save_sharded
from tests.engine import built_in_jobs, context_jobs, expert_jobs, undivided_jobs
from tests.engine.rank_steps import (
    BUILT_IN_CASES,
    CONTEXT_CASES,
    DIVIDED_MIXTURES,
    ENCODER_CASES,
    EXPERT_CASES,
    TENSOR_CASES,
    train,
    whole,
)
from tests.engine.ranks import CPU, micro_batch
from tests.engine.tensor_jobs import CARRIED, REFUSED, Drawn, DrawnTied, Other, ScaledLogits, Words, words
from tests.engine.zero_ranks import weights, window

HYBRID, TENSOR, BOTH, ALL = "dp_replicate=2,dp_shard=2", "tp=2", "dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2,tp=2"
COPIED, COPIED_EXPERTS = "dp_replicate=2,tp=2", "dp_replicate=2,ep=2"
COPIED_BOTH = "dp_replicate=2,tp=2,ep=2"
"""Replicas of cut layers, and of divided experts, that are not sharded."""
STEPS = {
    "late units": {},
    "two nets": {},
    "blocks": {},
    "units before": {"sync_each_micro_batch": False},
    "stages, full": {},
    "borrowed": {},
    "numbers": {},
    **{
        case: {}
        for case in TENSOR_CASES | BUILT_IN_CASES | ENCODER_CASES | EXPERT_CASES | CONTEXT_CASES | DIVIDED_MIXTURES
    },
}
"""Cases of ``rank_steps`` with the engine's choices."""
STATES, WHOLE_STATES, REFUSALS, FIRST = "states", "whole states", "refusals", "first values"
UNDIVIDED = "undivided"
SEQUENCES, SEQUENCE = "sequences", {"sequence_parallel": True}
"""Cases of ``rank_steps`` whose tokens are divided too: results are under (SEQUENCES, case)."""
DIVIDED_TOKENS = ("llama", "tied llama", "norms of heads", "scaled embedding")
SCALED = "scaled adam"
KEPT = {
    "s1": built_in_jobs.Tokens, "diffusers": built_in_jobs.Diffused,
    "mixture": expert_jobs.Mixture, "biased experts": expert_jobs.Biased, "scaled logits": ScaledLogits,
}  # fmt: skip
"""Nets with fused projections, an optimizer that keeps the state of tensors of one shape together, experts, and a
single number."""
DIVIDED, DIVIDED_BOTH, DIVIDED_ALL = "ep=2", "dp_shard=2,ep=2", "dp_replicate=2,dp_shard=2,ep=2"
CUT_DIVIDED, CUT_DIVIDED_BOTH = "tp=2,ep=2", "dp_shard=2,tp=2,ep=2"
CUT_DIVIDED_ALL = "dp_replicate=2,dp_shard=2,tp=2,ep=2"
CUT_SENT, CUT_SENT_BOTH = "dp_shard_in_ep=2,tp=2", "dp_shard=2,dp_shard_in_ep=2,tp=2"
"""Meshes whose ranks have a part of some experts."""
SENT, SENT_BOTH, SENT_ALL = (f"{more}dp_shard_in_ep=2" for more in ("", "dp_shard=2,", "dp_replicate=2,dp_shard=2,"))
"""Meshes whose ranks send each other tokens."""
READERS = ("dp_shard=4", HYBRID, BOTH, COPIED)
"""Meshes of four ranks that go on with what another one wrote."""
EXPERT_READERS = ("dp_shard=4", "ep=4", DIVIDED_BOTH, COPIED_EXPERTS, SENT_BOTH)
"""The same for nets with experts; where ``tp`` can cut them, BOTH, CUT_DIVIDED and CUT_SENT too."""


def readers_of(name):
    if name in expert_jobs.CARRIED:
        return (*EXPERT_READERS, BOTH, CUT_DIVIDED, CUT_SENT) if name in expert_jobs.CUT else EXPERT_READERS
    return READERS


def batches_of(name):
    return words if name in expert_jobs.CARRIED | CARRIED else built_in_jobs.batches(KEPT[name])


def main():
    join()
    folder, mesh, cases = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    results = {} if WHOLE_STATES in cases else steps(mesh, cases)
    if STATES in cases:
        for writer in READERS:
            results["saved", writer] = saved(engine(writer), folder / writer)
        results |= {
            (writer, reader): goes_on(engine(reader), folder / writer)
            for writer in ("single", *READERS)
            for reader in READERS
        }
    for name in KEPT.keys() & set(cases) if WHOLE_STATES in cases else ():
        for writer in readers_of(name):
            results[name, writer] = kept(name, engine(writer), folder / name / writer)
        for writer in ("single", *readers_of(name)):
            for reader in readers_of(name):
                results[name, writer, reader] = read(name, engine(reader), folder / name / writer)
    if REFUSALS in cases:
        results[REFUSALS] = {kind.__name__: refusal(kind, mesh) for kind in REFUSED | built_in_jobs.REFUSED}
    if UNDIVIDED in cases:
        results[UNDIVIDED] = {kind.__name__: undivided(kind, mesh) for kind in undivided_jobs.REFUSED}
    if SEQUENCES in cases:
        results |= {(SEQUENCES, case): train(case, engine(mesh, **SEQUENCE)) for case in DIVIDED_TOKENS}
    if SCALED in cases:
        results[SCALED] = scaled_steps(engine(mesh).mesh)
    if FIRST in cases:
        results[FIRST] = {kind.__name__: first_values(kind, engine(mesh)) for kind in drawn(mesh)}
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


def drawn(mesh):
    """Jobs whose modules are given their values one by one, which this mesh carries."""
    if parse_mesh(mesh).dp_shard_in_ep > 1:
        return (expert_jobs.DrawnMixture,)
    return (Drawn,) if parse_mesh(mesh).pp > 1 else (Drawn, DrawnTied)


def steps(mesh, cases):
    return {case: train(case, engine(mesh, **STEPS[case])) for case in cases if case in STEPS}


def first_values(kind, engine):
    """Weights of a net and of its average, and buffers, as they are before the first window."""
    torch.manual_seed(11)
    train_state = build(kind(), CPU, engine)
    net = train_state.nets["net"]
    nets = {"net": net, **({"average": train_state.ema["net"]} if train_state.ema else {})}
    values = {(name, key): value for name in nets for key, value in engine.weights(nets[name]).items()}
    buffers = {("buffer", name): buffer.clone() for name, buffer in net.named_buffers()}
    return {**values, **buffers}


def engine(mesh, **how):
    return make_engine("fsdp2", CPU, parse_mesh(mesh), **how)


def refusal(kind, mesh):
    try:
        build(kind(), CPU, engine(mesh))
    except InputError as error:
        return str(error)
    return "carried"


def undivided(kind, mesh):
    """What is said of a job whose sequences cannot be divided, when it is built or in its first window."""
    try:
        train_state = build(kind(), CPU, engine(mesh))
        run_window(train_state, [micro_batch(train_state.job, part) for part in context_jobs.sequences([2])])
    except InputError as error:
        return str(error)
    return "carried"


def saved(engine, folder):
    """Trains a window, saves, trains another; the weights then, averages too."""
    train_state = build(Words(), CPU, engine)
    _window(train_state)
    save_sharded(train_state, folder)
    _window(train_state)
    return weights(train_state)


def goes_on(engine, folder):
    """Loads into nets of other weights, and trains the other window."""
    train_state = build(Other(), CPU, engine)
    load_sharded(train_state, folder)
    _window(train_state)
    return weights(train_state)


def kept(name, engine, folder):
    """Trains two windows and saves; every whole tensor of the state then."""
    train_state = build(KEPT[name](), CPU, engine)
    for _ in range(2):
        window(train_state, batches_of(name))
    save_sharded(train_state, folder)
    return whole_state(train_state)


def read(name, engine, folder):
    """The same after it was read into a job that has trained nothing."""
    train_state = build(KEPT[name](), CPU, engine)
    load_sharded(train_state, folder)
    return whole_state(train_state)


def scaled_steps(mesh=None):
    """Weights after steps of ScaledAdam that clip and resize; on a mesh, tensors have parts of several kinds."""
    torch.manual_seed(3)
    kinds = [((5, 4), Shard(0)), ((5, 4), Shard(1)), ((5, 4), Replicate()), ((7,), Shard(0)), ((1,), Replicate())]

    def placed(value, placement):
        return value if mesh is None else distribute_tensor(value, mesh, [placement])

    parameters = [nn.Parameter(placed(torch.randn(shape), placement)) for shape, placement in kinds]
    optimizer = ScaledAdam(parameters, 0.03, clipping_period=2, size_period=2)
    for _ in range(6):
        for parameter, (shape, placement) in zip(parameters, kinds, strict=True):
            parameter.grad = placed(torch.randn(shape), placement)
        optimizer.step()
    return [whole(parameter) for parameter in parameters]


def whole_state(train_state):
    """Weights, averages and the optimizers' state, gathered."""
    values = dict(weights(train_state))
    for name, optimizer in train_state.optimizers.items():
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            for key, value in optimizer.state.get(parameter, {}).items():
                values[f"{name}.{number}.{key}"] = whole(torch.as_tensor(value))
    return values


def _window(train_state):
    window(train_state, words)


if __name__ == "__main__":
    main()
