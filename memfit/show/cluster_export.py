"""A plan as a batch script of Slurm or a task of SkyPilot, which start ``memfit run`` on every machine.

Formats: Slurm 23.11 (``sbatch``), SkyPilot 0.10 (``sky launch TASK.yaml``).
"""

from __future__ import annotations

import json
import shlex

from memfit.errors import InputError
from memfit.plan import Plan
from memfit.printable import one_line
from memfit.wording import precision_words

PORT = 29400
"""Where machine 0 listens; in Slurm's script it is moved by the job's number, since jobs may share a machine."""


def devices_per_node(plan: Plan, nodes: int) -> int:
    """The devices that each machine has.

    Raises:
        InputError: the plan's devices do not divide by the machines.
    """
    devices = plan.ranks
    if devices % nodes:
        why = f"the plan's {devices} devices are not a multiple of it"
        raise InputError(f"--nnodes {nodes}", why, "plan with as many --devices on each machine")
    return devices // nodes


def slurm_script(plan: Plan, nodes: int, plan_file: str) -> str:
    """A script for ``sbatch``: one task a machine, stopped two minutes before the limit.

    Slurm queues it again where a machine failed or another job took its place; after its limit, submit it again.
    """
    here = devices_per_node(plan, nodes)
    gpus = "" if plan.device == "cpu" else f"#SBATCH --gpus-per-node={here}\n"
    run = f"memfit run {shlex.quote(plan_file)} --out run --resume"
    meet = '--nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rdzv-endpoint "$MEMFIT_ENDPOINT"'
    return f"""#!/bin/sh
#SBATCH --job-name=memfit
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --requeue
#SBATCH --signal=TERM@120
{_comment(plan)}# The folder of sbatch must be one that all machines share: run/ is written there.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MEMFIT_ENDPOINT="$head:$(({PORT} + SLURM_JOB_ID % 20000))"
exec srun sh -c {shlex.quote(run if nodes == 1 else f"exec {run} {meet}")}
"""


def skypilot_task(plan: Plan, nodes: int, plan_file: str) -> str:
    """A task for ``sky launch``, run on every machine."""
    here = devices_per_node(plan, nodes)
    card = "" if plan.device == "cpu" else f"resources:\n  accelerators: {json.dumps(f'{plan.device}:{here}')}\n"
    run = f"exec memfit run {shlex.quote(plan_file)} --out shared/run --resume"
    meet = (
        ' --nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK"'
        f' --rdzv-endpoint "$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"'
    )
    return f"""{_comment(plan)}# Accelerators have the names of `sky show-gpus`.
# All machines must mount one disk or bucket as ./shared.
name: memfit
num_nodes: {nodes}
{card}workdir: .
setup: pip install memfit
run: {json.dumps(run if nodes == 1 else run + meet)}
"""


def _comment(plan: Plan) -> str:
    precision = precision_words(plan.precision, plan.net_kind)
    return f"# {one_line(f'{plan.job}: {plan.arithmetic}, {plan.engine}, {precision}')}\n"
