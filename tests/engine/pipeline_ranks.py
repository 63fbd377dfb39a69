"""What ranks do in test_pipeline_ranks.py: torchrun … -m tests.engine.pipeline_ranks FOLDER MESH CASE…

A case is one of ``STEPS``, HALF for those with gathers in bf16, or STATES for checkpoints.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from memfit.apply.checkpointing import recompute
from memfit.apply.losses import MicroBatch
from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.engine.factory import make_engine
from memfit.engine.process_group import join
from memfit.mesh import parse_mesh
from memfit.trace.step_phases import validate_once
from memfit.train.checkpoint.sharded_checkpoint import load_sharded, save_sharded
from tests.engine import context_jobs, encoder_jobs
from tests.engine.expert_jobs import CUT as CUT_EXPERTS
from tests.engine.pipeline_jobs import Counted, Decoded, Gated, HeadOnly, Stages
from tests.engine.ranks import CPU, count
from tests.engine.tensor_jobs import Adapted, Normed, Other, Words, words
from tests.engine.zero_ranks import weights, window

ON_TWO_RANKS = "llama, interleaved_zero_bubble"
"""A net of five modules, of which two ranks hold four stages."""
HEADS, MIXTURE, ADAPTED, SHARED = "norms of heads", "mixture", "adapted", "shared expert"
TWO_STAGES = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules that give each rank two stages."""
KINDS = {
    "llama": Words, "stages": Stages, "counted": Counted, "recomputed": Counted, "counted, gpipe": Counted,
    "stages, interleaved_1f1b": Stages, "recomputed, interleaved_1f1b": Counted, "decoded": Decoded,
    ON_TWO_RANKS: Words, "stages, interleaved_zero_bubble": Stages,
    "recomputed, interleaved_zero_bubble": Counted, HEADS: Normed, MIXTURE: CUT_EXPERTS[MIXTURE],
    SHARED: CUT_EXPERTS[SHARED], ADAPTED: Adapted, "gated": Gated, "head only": HeadOnly, **encoder_jobs.STAGED,
    **context_jobs.STAGED, **context_jobs.MIXTURES,
    **{f"mixture, {schedule}": CUT_EXPERTS[MIXTURE] for schedule in TWO_STAGES},
    **{f"divided mixture, {schedule}": context_jobs.DividedMixture for schedule in TWO_STAGES},
}  # fmt: skip
STEPS = {name: {"schedule": schedule} if (schedule := name.partition(", ")[2]) else {} for name in KINDS}
NAMED = "decoded, named"
"""A case of two stages whose first modules are named."""
KINDS[NAMED], STEPS[NAMED] = Decoded, {"first_modules": ["net.embed", "net.ups.2"]}
"""Cases with the engine's choices."""
HALF_GATHERED = {name: {"half_gather": True, **STEPS[name]} for name in ("llama", HEADS, ON_TWO_RANKS)}
"""Cases of sharded stages in bf16, whose results are under (HALF, case)."""
HALF = "half"
RECOMPUTED = {"net.blocks.0": "full", "net.blocks.4": "full"}
RECOMPUTED_LAYERS = {"net.model.layers.0": "full", "net.model.layers.2": "full"}
SIZES = [3, 3, 3, 3, 2, 3, 3, 3, 3, 3, 3, 3]
"""Samples of a window's micro-batches: of those of one shape, some are more than the stages, and one is less. Of two
ranks with samples of their own, one has another shape between two of the same, and the other has one shape."""
STATES = "states"
SEQUENCES = ("pp=2,cp=2", "pp=2,dp_shard=2,cp=2", "pp=2,dp_replicate=2,cp=2", "pp=2,cp=2,tp=2")
"""Stages whose ranks hold parts of sequences."""
DIVIDED_SEQUENCES = ("pp=2,cp=2,ep=2", "pp=2,dp_shard_in_ep=2,cp=2")
"""The same, where the ranks divide experts too."""
SENT = ("pp=2,dp_shard_in_ep=2", "pp=2,dp_shard=2,dp_shard_in_ep=2", "pp=2,dp_shard_in_ep=2,tp=2")
"""Stages whose ranks send each other the tokens of experts."""
BOTH, COPIED, CUT = "pp=2,dp_shard=2", "pp=2,dp_replicate=2", "pp=2,tp=2"
HYBRID, ALL, COPIED_CUT = (
    f"pp=2,{other}" for other in ("dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2", "dp_replicate=2,tp=2")
)
EVERY, DIVIDED, DIVIDED_BOTH = "pp=2,dp_replicate=2,dp_shard=2,tp=2", "pp=2,ep=2", "pp=2,dp_shard=2,ep=2"
DIVIDED_TOO = ("dp_replicate=2,ep=2", "tp=2,ep=2", "dp_shard=2,tp=2,ep=2", "dp_replicate=2,dp_shard=2,ep=2")
"""Beside stages: meshes of 8 and 16 ranks."""
MESHES = {2: ("pp=2", "dp_shard=2", "tp=2"), 4: (BOTH, COPIED, CUT, "dp_shard=4", "dp_shard=2,tp=2")}
"""Meshes of two and of four ranks that go on with what another one wrote."""


def main():
    join()
    folder, mesh, cases = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    results = {case: train(case, engine(mesh, **STEPS[case])) for case in cases if case in STEPS}
    if HALF in cases:
        for case, how in HALF_GATHERED.items():
            results[HALF, case] = train(case, engine(mesh, **how), "bf16")
    if STATES in cases:
        meshes = MESHES[dist.get_world_size()]
        results |= {("saved", writer): saved(engine(writer), folder / writer) for writer in meshes}
        results |= {
            (writer, reader): goes_on(engine(reader), folder / writer)
            for writer in ("single", *meshes)
            for reader in meshes
        }
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


def engine(mesh, **how):
    return make_engine("fsdp2", CPU, parse_mesh(mesh), **how)


def data_of(job):
    """What gives a job's micro-batches of given sizes."""
    if isinstance(job, encoder_jobs.Encoder):
        return encoder_jobs.batches(type(job))
    return context_jobs.sequences if isinstance(job, context_jobs.Divided) else words


def micro_batches(job, shares=1, share=0):
    def fetch(number, part):
        torch.manual_seed(number)
        return part

    each = len(SIZES) // shares
    made = [
        MicroBatch(fetch=lambda number=number, part=part: fetch(number, part), padded_units=count(part) * 6,
                   units=job.units(part))
        for number, part in enumerate(data_of(job)(SIZES))
    ]  # fmt: skip
    return made[each * share : each * (share + 1)]


def train(case, engine, precision="fp32"):
    """Losses, norms, weights, averages and a validation after three windows."""
    job = KINDS[case]()
    job.precision = precision
    train_state = build(job, CPU, engine)
    numbers, recomputed = [], {}
    if case.startswith("recomputed"):
        recomputed = RECOMPUTED_LAYERS if isinstance(job, context_jobs.Divided) else RECOMPUTED
    for _ in range(3):
        with recompute(train_state.nets, recomputed):
            result = run_window(train_state, micro_batches(train_state.job, engine.data_world, engine.data_rank))
        numbers.append({name: float(value) for name, value in result.losses.items()})
        numbers.append({name: float(value) for name, value in result.norms.items() if value is not None})
    if train_state.job.validates:
        for size in (4, 2):
            part = data_of(train_state.job)([size])[0]
            values = validate_once(train_state, lambda part=part: part, lambda part: None)
            numbers.append({name: float(value) for name, value in values.items()})
    return {"weights": weights(train_state), "numbers": numbers}


def saved(engine, folder):
    """Trains a window, saves, trains another; the weights then, averages too."""
    train_state = build(Words(), CPU, engine)
    window(train_state, words)
    save_sharded(train_state, folder)
    window(train_state, words)
    return weights(train_state)


def goes_on(engine, folder):
    """Loads into nets of other weights, and trains the other window."""
    train_state = build(Other(), CPU, engine)
    load_sharded(train_state, folder)
    window(train_state, words)
    return weights(train_state)


if __name__ == "__main__":
    main()
