"""Starts the training processes of a plan on one of several machines."""

from __future__ import annotations

import os
from dataclasses import replace

from memfit.child_process import no_orphans
from memfit.engine.nodes import Nodes
from memfit.plan import Plan, write_plan
from memfit.train.launch.launch import RANK, Launched, argument_of, clean, judged, worker_environment
from memfit.train.launch.node_folders import SEPARATE
from memfit.train.launch.node_launch import acknowledge, await_acknowledgements, await_outcome, meet, shared_outcome
from memfit.train.launch.outcome import spare_folder
from memfit.train.launch.process_guard import for_child
from memfit.train.launch.supervisor import Supervisor
from memfit.train.launch.torchrun import restarts, torchrun
from memfit.train.launch.watchdog import clear_earlier
from memfit.train.run_folder import RunFolder
from memfit.train.run_options import RunOptions


def launch_node(plan: Plan, options: RunOptions, nodes: Nodes) -> Launched:
    """Trains a plan in processes of several machines, and waits for the end of those on this one.

    Raises:
        InputError: the nodes do not meet.
    """
    folder, ranks = RunFolder(options.folder), plan.ranks // nodes.count
    if nodes.rank == 0:
        clear_earlier(folder)
    supervisor = Supervisor()
    with spare_folder(), meet(nodes, folder.path, lambda: supervisor.signalled is not None) as meeting:
        if meeting.is_separate:
            write_plan(plan, folder.plan)
            os.environ[SEPARATE] = "1"
        with no_orphans(), supervisor.guarding(), shared_outcome(meeting, folder.path):
            os.environ.update({**worker_environment(), **for_child()})
            options = replace(options, resume=options.resume or (nodes.rank > 0 and meeting.has_begun))
            code = torchrun(ranks, RANK, [argument_of(options)], folder.path, restarts(plan), meeting)
        if meeting.is_separate:
            await_outcome(meeting, folder.path)
        launched = judged(folder, code, supervisor, keeps_run=not meeting.is_separate)
        if nodes.rank > 0:
            acknowledge(meeting)
            if meeting.is_separate:
                clean(folder)
            return replace(launched, line="")
        if meeting.has_begun:
            await_acknowledgements(meeting)
    clean(folder)
    return replace(launched, signalled=supervisor.signalled is not None)
