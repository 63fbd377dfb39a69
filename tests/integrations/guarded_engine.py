"""One rank of guarded DeepSpeed engines: torchrun --nproc-per-node N guarded_engine.py FILE FAILURES.

Trains the same windows with stages 0, 1 and 2; each ends with a micro-batch without a valid unit. The last rank's
backwards with these numbers fail, and with one rank a write of an optimizer's step too. Rank 0 writes the weights of
each stage, and what is refused.
"""

import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import memfit
from memfit.engine.deepspeed import load
from memfit.errors import InputError
from tests.accumulation.nets import RANK_SIZES, Failures, Net, failing_step, mean_loss, mean_over_nothing, windows


def engine_of(stage: int, net: Net, **config: Any) -> Any:
    """An engine around SGD; a few elements a bucket, so that gradients are reduced in several."""
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64, "allgather_bucket_size": 64},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.05,
    }
    groups = [{"params": list(part.parameters())} for part in (net.first, net.last)]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=given | config)[0]


def net() -> Net:
    torch.manual_seed(0)
    return Net().float()


def resumed(folder: str) -> list[torch.Tensor]:
    """The weights after a failure in the first window, DeepSpeed's own checkpoint of it, and two more windows."""
    for number, batches in enumerate(windows(3, RANK_SIZES[0])):
        model = net()
        Failures(model, {1} if number == 0 else set())
        engine = engine_of(2, model)
        guard = memfit.deepspeed.guard(engine)
        if number:
            engine.load_checkpoint(folder)
        for part in guard.window(batches):
            with part as (x, y):
                guard.backward(mean_loss(engine, (x.float(), y.float())), len(x))
        engine.step()
        engine.save_checkpoint(folder)
    return [p.detach().clone() for p in model.parameters()]


def trained(stage: int, failures: set[int]) -> list[torch.Tensor]:
    rank = dist.get_rank()
    model = net()
    Failures(model, failures if rank == dist.get_world_size() - 1 else set())
    engine = engine_of(stage, model)
    guard, watch = memfit.deepspeed.guard(engine), memfit.watch(engine, out=None)
    for number, batches in enumerate(windows(3, RANK_SIZES[rank])):
        for part in guard.window([*batches, None]):
            with part as batch:
                if batch is None:
                    guard.backward(mean_over_nothing(engine, batches[0][0].float()), 0)
                else:
                    guard.backward(mean_loss(engine, (batch[0].float(), batch[1].float())), len(batch[0]))
        if number == 1 and dist.get_world_size() == 1:
            with failing_step(stepped(engine), 1):
                engine.step()
        else:
            engine.step()
    assert watch.steps == 3, "each of two groups is a step of ZeRO's own optimizer"
    assert guard.failures == (len(failures) if rank == dist.get_world_size() - 1 else 0)
    return [p.detach().clone() for p in model.parameters()]


def stepped(engine: Any) -> torch.Tensor:
    """The last tensor that the engine's own optimizer steps."""
    return engine.basic_optimizer.param_groups[-1]["params"][-1]


def refusals() -> dict[str, str]:
    """What a guard says of engines that it cannot carry, by name."""
    made = {
        "accumulation": lambda: engine_of(0, net(), gradient_accumulation_steps=3),
        "stage 3": lambda: engine_of(3, net()),
        "bf16": lambda: engine_of(0, net().to(torch.bfloat16), bf16={"enabled": True}),
        "a model": net,
    }
    said = {}
    for name, make in made.items():
        try:
            memfit.deepspeed.guard(make())
        except InputError as error:
            said[name] = str(error)
    return said


def lost() -> str:
    """The failure of a sample that does not fit alone, after which the engine trains on."""
    model = net()
    Failures(model, set(range(20)))
    engine = engine_of(2, model)
    guard = memfit.deepspeed.guard(engine)
    try:
        for part in guard.window([torch.randn(2, 6)]):
            with part as x:
                guard.backward(engine(x).square().mean(), len(x))
    except torch.OutOfMemoryError as error:
        assert all(p.grad is None for p in model.parameters())
        return str(error)
    return "nothing"


def main() -> None:
    file, failures = sys.argv[1:]
    dist.init_process_group("gloo")
    load()
    numbers = {int(number) for number in failures.split(",") if number}
    weights = {stage: trained(stage, numbers) for stage in (0, 1, 2)}
    alone = dist.get_world_size() == 1
    if alone:
        own = {"refused": refusals(), "lost": lost(), "resumed": resumed(f"{file}.checkpoints")}
        torch.save({"weights": weights, **own}, file)
    elif dist.get_rank() == 0:
        torch.save({"weights": weights}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
