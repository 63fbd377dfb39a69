"""What each rank really allocates: torchrun --nproc-per-node N -m tests.engine.rank_peaks FOLDER.

A collective's own buffers are apart. Its thread lets go of the tensors it was given a little after it is done, unseen
by the profiler: each collective here returns only when it has, so that the trainer's thread frees what it made.
"""

import gc
import pickle
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.tensor.debug
from torch.distributed.tensor import _collective_utils
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from memfit.apply.checkpointing import recompute
from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.device.hardware.benchmarks import AllocatorEvents
from memfit.engine.factory import make_engine
from memfit.engine.process_group import join
from memfit.planner.predict import default_checkpointing, plain_nets
from memfit.trace.step_phases import fetch_synthetic, save_once, synthetic_micro_batch, validate_once
from tests.engine.rank_peak_cases import EVERY_CASE

CPU = torch.device("cpu")
OPERATORS = "operators.pickle"
OF_DTENSOR = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Collectives that DTensor calls, of torch.ops._c10d_functional."""
OWN_HOLDERS = 3
"""As ``holders`` counts those of a tensor that only a variable holds; autograd's node holds its storage too."""


def measure(case, operators):
    """Peaks of one rank, phase by phase."""
    torch.manual_seed(0)
    modes = default_checkpointing(case.job(), plain_nets(case.job()))
    engine = make_engine(case.engine, CPU, case.mesh, **case.choices)
    gc.collect()
    gc.disable()
    try:
        with AllocatorEvents() as events:
            with events.phase("setup"):
                train_state = build(case.job(), CPU, engine)
            micro = synthetic_micro_batch(train_state.job, case.shape, CPU)
            with recompute(train_state.nets, modes):
                for _ in range(2):
                    with events.phase("train"):
                        run_window(train_state, [micro] * case.micro_batches)
            if train_state.job.validates:
                with events.phase("validate"):
                    validate_once(
                        train_state,
                        lambda: fetch_synthetic(train_state.job, case.shape, CPU, validation=True),
                        lambda part: None,
                    )
            with events.phase("save"):
                save_once(train_state)
    finally:
        gc.enable()
    return events.peaks(operators)


@contextmanager
def settled():
    """Inside, a collective returns when its thread has let go of its tensors; pickled objects are the transport's.

    ``torch.distributed.tensor.debug`` is imported before: it reads operators that are replaced here.
    """
    names = (
        "all_gather_single", "all_gather_into_tensor", "all_gather", "reduce_scatter_single", "reduce_scatter_tensor",
        "all_reduce", "broadcast", "all_gather_object",
    )  # fmt: skip
    called_by = {(dist, name): getattr(dist, name) for name in names}
    called_by |= {(_collective_utils, name): getattr(_collective_utils, name) for name in ("broadcast", "scatter")}

    def holders(tensor):
        return tensor._use_count() + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    def waiting(call):
        def run(*args, **kwargs):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            counts = list(map(holders, tensors))
            with record_function(f"c10d::{call.__name__}") if call.__name__.endswith("_object") else nullcontext():
                work = call(*args, **kwargs)
            if work is not None:
                work.wait()
                now, last = list(map(holders, tensors)), None
                while now != last:
                    time.sleep(0.02)
                    now, last = list(map(holders, tensors)), now
                return work
            end = time.monotonic() + 5
            while time.monotonic() < end and any(
                now > before for now, before in zip(map(holders, tensors), counts, strict=True)
            ):
                time.sleep(0.0005)
            return work

        return run

    def waiting_operator(operator):
        """The operator itself: what a functional collective makes of its argument, the operator alone may hold."""

        def run(tensor, *args, **kwargs):
            count = holders(tensor)
            output = torch.ops._c10d_functional.wait_tensor(operator(tensor, *args, **kwargs))
            end = time.monotonic() + 60
            own = OWN_HOLDERS + (output.grad_fn is not None)
            while holders(tensor) > count or holders(output) > own:
                assert time.monotonic() < end, f"{operator} holds its tensors: what is freed later is not seen"
                time.sleep(0.0005)
            return output

        return run

    functional = torch.ops._c10d_functional
    own = {name: getattr(functional, name) for name in OF_DTENSOR}
    for (module, name), call in called_by.items():
        setattr(module, name, waiting(call))
    for name, operator in own.items():
        setattr(functional, name, waiting_operator(operator))
    try:
        yield
    finally:
        for (module, name), call in called_by.items():
            setattr(module, name, call)
        for name, operator in own.items():
            setattr(functional, name, operator)


def main():
    join()
    folder = Path(sys.argv[1])
    operators = pickle.loads((folder / OPERATORS).read_bytes())
    with settled():
        by_name = {
            str(case): measure(case, operators) for case in EVERY_CASE if len(sys.argv) < 3 or str(case) in sys.argv[2:]
        }
    (folder / f"{dist.get_rank()}.pickle").write_bytes(pickle.dumps(by_name))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
