"""Tables and paragraphs of the documentation whose figures come from bench/results or from the code.

``TABLES`` and ``TEXTS`` give each by the name that a page writes in its block (docs/blocks.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from docs import accuracy_tables, benchmark_tables, titan_tables
from docs.results import GIB, gib, result, table


def published() -> str:
    """Every published figure beside its prediction. A GB of a tool is 2^30 bytes; of a README it may be 10^9."""
    rows = []
    for row in result("published")["rows"]:
        several = row["world"] > 1 or row["engine"] == "zero2"
        run_as = row["engine"] + (f" on {row['world']}" if several else "") + f", {row['card']}"
        predicted = gib(row["predicted_bytes"])
        if row["sequence_bytes"]:
            predicted += f", {row['sequence_bytes'] / GIB:.1f} after 150 batches of varying lengths"
        off = f"{row['error']:+.1%}"
        if row["error_decimal"] is not None:
            off += f" ({row['error_decimal']:+.1%} if 10⁹)"
        what = "" if row["kind"] == "process" else f" {row['kind']}"
        job = f"{row['job']}, {row['micro_batch']} {row['unit']}, {row['phase']}{what}"
        rows.append([job, run_as, row["published"], predicted, off])
    return table(["job, micro-batch", "run as", "published", "predicted", "error"], rows)


def musetalk_ranks() -> str:
    """MuseTalk's first stage on one, two and eight ranks of ZeRO-2."""
    by_micro_batch: dict[int, dict[int, Mapping[str, Any]]] = {}
    for row in result("published")["rows"]:
        if row["job"] == "musetalk/stage1":
            by_micro_batch.setdefault(row["micro_batch"], {})[row["world"]] = row
    worlds = sorted(next(iter(by_micro_batch.values())))
    head = ["images", "published", *(f"{world} rank{'s' if world > 1 else ''}" for world in worlds)]
    return table(
        head,
        (
            [images, rows[worlds[0]]["published"], *(gib(rows[world]["predicted_bytes"]) for world in worlds)]
            for images, rows in by_micro_batch.items()
        ),
    )


def latentsync_training() -> str:
    """What is known of LatentSync's training at 256 and 512 px, with and without what the rows leave out."""
    rows = {row["job"]: row for row in result("published")["rows"] if row["phase"] == "train"}
    small, large = rows["latentsync/stage1"], rows["latentsync/stage1_512"]
    with_both = [
        (row["predicted_bytes"] + (copies + NCCL_GIB) * GIB) / (float(row["published"].split()[0]) * 1e9) - 1
        for row, copies in ((small, 0.25), (large, 1.0))
    ]
    return (
        f"**512 px.** The prediction for training, {gib(large['predicted_bytes'])}, differs by {large['error']:+.1%} "
        f"from the README's {large['published']}, or by {large['error_decimal']:+.1%} if GB is 10⁹ bytes. "
        f"{gib(large['allocated_bytes'])} are allocated at the peak; cached segments and the CUDA context are the "
        "rest. Not in the rows: workspaces of forward convolutions in half precision (copies of input, weight and "
        "output to channels last, as in the backward), which would add 1.0 GiB at 512 px and 0.25 GiB at 256 px, and "
        f"NCCL's buffers on several cards, about {NCCL_GIB} GiB. Whether cuDNN takes those workspaces without its "
        "search was not measured on any card. With both, and GB as 10⁹ bytes, the errors are "
        f"{with_both[0]:+.1%} at 256 px and {with_both[1]:+.1%} at 512 px; without, {small['error_decimal']:+.1%} and "
        f"{large['error_decimal']:+.1%}."
    )


NCCL_GIB = 0.45
"""GiB that NCCL's buffers take beside a process's allocator, about."""


def _modes(modes: Mapping[str, int]) -> str:
    counts = [f"{count} {mode}" for mode, count in sorted(modes.items()) if mode != "keep"]
    return ", ".join(counts) or "everything kept"


def cards() -> str:
    cards_kept = result("cards")
    rows = []
    for name, row in sorted(cards_kept.get("plans", cards_kept).items()):
        job, _, rest = name.partition("@")
        card = rest.split(" ")[0]
        used = f"{gib(max(row['process_bytes'].values()))} of {gib(row['usable_bytes'])}"
        rows.append([job, card, row["arithmetic"].removesuffix(" on 1 device"), _modes(row["modes"]), used])
    return table(["job", "card", "global batch", "recomputed modules", "peak of usable memory"], rows)


def timing() -> str:
    kinds: dict[str, list[float]] = {}
    for row in result("timing")["rows"]:
        kinds.setdefault(row["net_kind"].split(",")[0], []).append(row["measured"] / row["estimated"] - 1)
    rows = ([kind, len(errors), f"{min(errors):+.1%}", f"{max(errors):+.1%}"] for kind, errors in kinds.items())
    return table(["kind of net", "windows", "from", "to"], rows)


def plan_speed() -> str:
    rows = (
        [name, row["arithmetic"], f"{row['processor_seconds']:.0f}", f"{row['clock_seconds']:.1f}",
         f"{row['loop_seconds']:.2f}"]
        for name, row in result("plan_speed")["plans"].items()
    )  # fmt: skip
    head = ["job, global batch, card", "plan", "processor seconds", "seconds by the clock", "seconds of the loop"]
    return table(head, rows)


def variants() -> str:
    rows = result("variants")["variants"]
    shown = ([row["variant"], f"{row['processor_seconds']:.1f}", f"{row['peak_bytes'] / 2**20:.0f}"] for row in rows)
    return table(["job", "processor seconds", "memory of the prediction, MiB"], shown)


def checkpoint_selection() -> str:
    rows = []
    for net, lines in result("planner")["nets"].items():
        kept = lines[0]["measured"] - lines[0]["resident"]
        for row in lines:
            part = (row["measured"] - row["resident"]) / kept
            ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
            rows.append([net, row["name"], f"{part:.0%}", ratio])
    return table(["net", "selection", "measured activations", "time / everything recomputed"], rows)


def accumulation() -> str:
    rows = (
        [f"{row['frames']} x {row['clips']}", row["plan"], f"{row['estimated']:.2f}", f"{row['measured']:.2f}",
         f"{row['plan_over_faster']:.2f}"]
        for row in result("accumulation")["cases"]
    )  # fmt: skip
    head = ["frames x clips", "plan", "accumulated / recomputed, estimated", "measured", "plan / faster of the two"]
    return table(head, rows)


def samplers() -> str:
    rows = []
    for name, row in result("samplers")["samplers"].items():
        rows.append([
            name, f"{row['seconds']:.2f}", f"{row['padding']:.2%}", f"{row['largest']:.3f}", f"{row['imbalance']:.2%}",
            f"{row['imbalance_quadratic']:.2%}", f"{row['resume']:.2f}",
        ])  # fmt: skip
    head = ["sampler", "CPU s", "padding", "largest / threshold", "imbalance, frames", "imbalance, frames²", "resume s"]
    return table(head, rows)


def upstream_scripts() -> str:
    """The training scripts of other projects, traced, beside the built-in jobs of the same nets."""
    rows = []
    for row in result("upstream_scripts")["scripts"]:
        jobs = row.get("job_bytes", {})
        for phase, nbytes in row["bytes"].items():
            job = [gib(jobs[phase]), f"{nbytes / jobs[phase] - 1:+.2%}"] if phase in jobs else ["-", "-"]
            rows.append([row["script"], phase, gib(nbytes), row.get("job", "no job of this net"), *job])
    return table(["script", "phase", "allocated", "built-in job", "allocated", "script above job"], rows)


def loop() -> str:
    rounds = result("loop")["rounds"]
    rows = []
    for name in rounds[0]:
        took, added = (
            [round_times[name][key] for round_times in rounds] for key in ("milliseconds", "added_milliseconds")
        )
        rows.append([name, _spread(took), _spread(added)])
    return table(["loop", "ms a step", "more than by hand, ms"], rows)


def loop_parts() -> str:
    """Where the time of the loop's own code goes."""
    parts = dict(result("loop")["microseconds_of_parts"])
    step = parts.pop("the step, as by hand")
    rows = [[name, f"{value:.0f}"] for name, value in sorted(parts.items(), key=lambda part: -part[1])]
    rows.append(["**together**", f"**{sum(parts.values()):.0f}**"])
    made = table(["part of memfit's loop", "microseconds a window"], rows)
    return f"{made}\n\nThe step itself takes {step:.0f} microseconds in it."


def loading() -> str:
    figures = result("loading")
    rows = (
        [row["data"], str(row["workers"]), f"{row['by_hand']:.0f}", f"{row['memfit']:.0f}",
         f"{row['memfit_over_by_hand']:.2f}"]
        for row in figures["rows"]
    )  # fmt: skip
    made = table(["data", "workers", "by hand, samples a second", "memfit", "ratio (median of rounds)"], rows)
    machine = figures["machine"]
    return f"{made}\n\n{figures['rounds']} rounds on {machine['processor']}, at a load of {machine['load']:.0f}."


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if min(values) != max(values) else f"{values[0]:.2f}"


def saving() -> str:
    rows = (
        [name, f"{row['seconds']:.2f}", f"{row['over_raw_by_rounds']:.2f}",
         f"{row['over_raw_least']:.2f} to {row['over_raw_most']:.2f}", f"{row['core_seconds']:.2f}"]
        for name, row in result("saving")["ways"].items()
    )  # fmt: skip
    return table(["way", "seconds", "x raw write (median)", "x raw write (range)", "core seconds"], rows)


def saving_text() -> str:
    saving = result("saving")
    held = saving["asynchronous_holds_up"]
    return (
        f"A checkpoint of {saving['bytes'] / 1e6:.0f} MB in {saving['tensors']} tensors, {saving['rounds']} rounds in "
        f"random order. An asynchronous checkpoint holds training up for {held['seconds_per_gigabyte']:.2f} s a GB "
        f"(median; at most {held['most_seconds_per_gigabyte']:.2f}), and its buffers take "
        f"{held['buffer_bytes'] / 1e6:.0f} MB."
    )


def kills() -> str:
    rows = (
        [name, row["kills"], row["while_saving"], row["finished"], row["passed_over"], row["repeated"]]
        for name, row in result("kills")["writing"].items()
    )
    head = [
        "checkpoints", "kills", "during a save", "runs that ended, equal byte for byte", "torn checkpoints loaded",
        "windows trained again",
    ]  # fmt: skip
    return table(head, rows)


def faults() -> str:
    kinds: dict[str, Counter[str]] = {}
    for row in result("faults")["rows"]:
        names = ("points", "done", "same_ids", "same_weights", "torn")
        kinds.setdefault(row["failure"], Counter()).update({name: row[name] for name in names})
    rows = [[kind, *(counts[name] for name in counts)] for kind, counts in kinds.items()]
    total = result("faults")["total"]
    rows.append(["**all**", *(total[name] for name in total)])
    return table(["failure in", "runs", "reached the end", "same samples", "same weights", "torn steps"], rows)


def sequence() -> str:
    by_frames = result("sequence")
    rows = []
    for frames in (3200, 7000):
        row = by_frames[f"{frames} frames"]
        segments, expandable = row["segments"], row["expandable"]
        rows.append([
            frames, f"{row['published_bytes'] / 1e9:.1f}", f"{segments['process_bytes_after_windows']['10'] / 1e9:.1f}",
            f"{segments['process_bytes'] / 1e9:.1f}", f"{segments['ratio']:.2f}",
            f"{expandable['process_bytes'] / 1e9:.1f}",
        ])  # fmt: skip
    head = [
        "frames", "published, GB", "after 10 windows, GB", "over the epoch, GB", "reserved / allocated",
        "expandable segments, GB",
    ]  # fmt: skip
    return table(head, rows)


def sequence_text() -> str:
    row = result("sequence")["different shapes"]
    return (
        f"{row['windows']:,} windows of {row['distinct_shapes']:,} different shapes take "
        f"{row['processor_seconds']:.0f} processor seconds."
    )


def probe() -> str:
    rows_by_name = result("probe")
    rows = []
    for name in ("probe", "probe --prove", "doubling and bisection"):
        if name in rows_by_name:
            row = rows_by_name[name]
            rows.append(
                [f"`memfit {name}`" if name.startswith("probe") else name, row["found"], row["trials"], row["failures"]]
            )
    return table(["search", "largest batch", "trials", "failed trials"], rows)


def creep() -> str:
    rows = []
    for case in result("creep")["cases"]:
        after = case["process_bytes_after_batch"]
        low, high = case["clip_seconds"]
        places = [number for number in (1, 2, 3, 7, len(after)) if number <= len(after)]
        rows.append([case["frames"], f"{low:g} to {high:g} s", *(f"{after[place - 1] / GIB:.1f}" for place in places)])
    head = ["frames", "clips", *(f"batch {number}" for number in (1, 2, 3, 7)), "last batch"]
    return table(head, rows)


def thousand_ranks() -> str:
    stored = result("thousand_ranks")
    return (
        f"`{stored['predicted']}` predicts one rank of 1,024 in {stored['processor_seconds']:.0f} processor seconds: "
        f"{gib(stored['allocated_bytes'])} of tensors at the peak."
    )


def large_mesh() -> str:
    """What it takes to predict a rank of thousands, and to choose a mesh."""
    stored = result("large_mesh")
    one, plan = stored["predict"], stored["plan"]
    held = sorted(one["train"]["categories"].items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in held)
    chosen = plan["meshes"][0]
    mesh = ",".join(f"{name}={size}" for name, size in chosen["mesh"].items())
    return (
        f"`{one['asked'].removesuffix(' --json')}` predicts the rank that needs most of {one['ranks']:,} in "
        f"{one['processor_seconds']:.0f} processor seconds and {gib(one['peak_bytes'])} of this machine's memory: "
        f"{gib(one['train']['allocated_bytes'])} of tensors at the peak ({parts} GiB); it "
        f"{'fits' if one['fits'] else 'does not fit'}.\n\n"
        f"`{plan['asked'].removesuffix(' --json')}` takes {plan['processor_seconds']:.0f} processor seconds for "
        f"{len(plan['meshes'])} meshes, and chooses {mesh} ({chosen['arithmetic']}; {chosen['policy']})."
    )


def titan() -> str:
    """Published rows of torchtitan and torchao, those that no step was predicted for included."""
    rows = []
    for row in result("titan")["rows"]:
        known = [f"{row['net']}: {row['how']}", row["ranks"], row["batch"], f"{row['published']:g}"]
        if row["validated"]:
            rows.append([*known, f"{row['predicted']:.2f}", f"{row['error']:+.1%}"])
        else:
            rows.append([*known, "not validated", row["why"]])
    return table(["step", "ranks", "batch", "published GiB", "predicted GiB", "error"], rows)


def titan_text() -> str:
    """What the predicted step holds, and what 8 and 128 ranks differ in."""
    stored = result("titan")
    row = next(row for row in stored["rows"] if row["validated"])
    parts = {name: nbytes for name, nbytes in row["categories"].items() if nbytes >= GIB // 10}
    held = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in sorted(parts.items(), key=lambda part: -part[1]))
    apart = stored["difference"]
    return (
        f"At its peak the step has {row['allocated_bytes'] / GIB:.1f} GiB allocated ({held}) and "
        f"{row['reserved_bytes'] / GIB:.1f} GiB reserved. Between {apart['ranks'][0]} and {apart['ranks'][1]} ranks it "
        f"reserves {apart['predicted']:.1f} GiB less (allocated: {apart['predicted_allocated']:.1f}); published, both "
        f"compiled and in Float8: {apart['published']:.1f}."
    )


def titan_trainer() -> str:
    """Llama 3.1 8B by torchtitan's own trainer, beside rows that were published for older versions."""
    stored = result("titan_trainer")
    rows = []
    for name, row in stored["steps"].items():
        ranks = row["mesh"]["dp_shard"]
        figure = stored["published"].get(name)
        published = "-" if figure is None else f"{figure:g}"
        error = "-" if figure is None else f"{row['reserved_bytes'] / GIB / figure - 1:+.1%}"
        predicted = [f"{row[size] / GIB:.2f}" for size in ("allocated_bytes", "reserved_bytes")]
        rows.append([name, ranks, *predicted, published, error])
    return table(["step", "ranks", "allocated GiB", "reserved GiB", "published GiB", "error"], rows)


def plan_cost() -> str:
    seconds = [row["processor_seconds"] for row in result("plan_speed")["plans"].values()]
    costs = [row["processor_seconds"] for row in result("variants")["variants"]]
    return (
        f"`memfit plan` took {min(seconds):.0f} to {max(seconds):.0f} processor seconds for the jobs below; "
        f"`memfit predict` takes {min(costs):.0f} to {max(costs):.0f} for the built-in jobs."
    )


def long_run() -> str:
    run = result("long_run")
    memory, lines, report = run["memory"], run["lines"], run["report"]
    drawn = sorted(report["drawn_seconds"])[len(report["drawn_seconds"]) // 2]
    held = {name: sum(sizes.values()) / 1e6 for name, sizes in lines.items()}
    return (
        f"A run of {run['windows']:,} windows of a small net grows by {memory['growth_bytes'] / 1e6:.1f} MB between "
        f"its windows {memory['window']:,} and {memory['last_window']:,}. Its lines take {held['metrics']:.0f} MB of "
        f"metrics and {held['samples']:.0f} MB of samples; its report has {report['bytes'] / 1e6:.1f} MB and is drawn "
        f"in {drawn:.1f} s (median of {len(report['drawn_seconds'])}, at a load of {run['machine']['load']:.0f})."
    )


def validation_trace_limit() -> str:
    from memfit.planner.search.validation_choice import TRACED

    return (
        f"Validation is traced again for options of up to {TRACED:,} operators in all. For a longer validation the "
        "job's first option comes first, then precision; the others say that they were not traced."
    )


def story() -> str:
    run = result("latentsync_story")
    peaks = {name: f"{size / 2**20:.0f} MiB" for name, size in run["upstream_predicted_bytes"].items()}
    return (
        f"Upstream's step needs {peaks['train']} in training and {peaks['validate']} in validation. In a budget of "
        f"{run['budget_bytes'] / 2**20:.0f} MiB it runs out of memory in {run['upstream_failed_in']}. memfit's "
        f"plan ({run['plan']}) validates after windows {', '.join(map(str, run['validated_after_windows']))}, each "
        f"at the first try, with {run['measured_process_bytes'] / 2**20:.0f} MiB measured at the peak."
    )


TABLES: dict[str, Callable[[], str]] = {
    "published": published, "torchtitan": titan,
    "torchtitan trainer": titan_trainer, "torchtitan registry": titan_tables.registry,
    "upstream scripts": upstream_scripts, "musetalk ranks": musetalk_ranks,
    "accuracy by half": accuracy_tables.accuracy_halves,
    "accuracy by kind of net": accuracy_tables.accuracy_kinds, "accuracy by rule": accuracy_tables.accuracy_rules,
    "accuracy of recipes": accuracy_tables.accuracy_recipes, "accuracy beside xMem": accuracy_tables.accuracy_xmem,
    "accuracy without recipes": accuracy_tables.accuracy_without_recipes,
    "accuracy on xMem's runs": accuracy_tables.accuracy_xmem_families,
    "accuracy of limits under AMP": accuracy_tables.accuracy_timm_amp,
    "workspace rules": accuracy_tables.workspace_rules, "workspace effect": accuracy_tables.workspace_effect,
    "workspace nets": accuracy_tables.workspace_nets,
    "convolution workspace": accuracy_tables.accuracy_workspace, "plans for cards": cards, "time estimates": timing,
    "plan speed": plan_speed, "prediction speed": variants, "samplers": samplers, "loop": loop,
    "loop parts": loop_parts, "loading": loading, "saving": saving,
    "kills": kills, "faults": faults, "epochs": sequence, "probe": probe, "creep": creep,
    "checkpoint selection": checkpoint_selection, "accumulation": accumulation,
    "peers": benchmark_tables.peers, "batch finders": benchmark_tables.batch_finders,
    "second questions": benchmark_tables.second_questions,
    "library remedies": benchmark_tables.library_remedies,
}  # fmt: skip


def robustness() -> str:
    """What the last recorded runs of the fuzzer and of the attacks found."""
    fuzz, attack = result("fuzz"), result("attack")
    kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(attack["kinds"].items()))
    return (
        f"The recorded run of the fuzzer (seed {fuzz['seed']}) tried {fuzz['cases']:,} inputs of "
        f"{len(fuzz['by_kind'])} kinds: {fuzz['failed']} ended in a traceback or another fault. The recorded attacks "
        f"(seed {attack['seed']}) were {attack['cases']} runs ({kinds}) in {len(attack['combinations'])} combinations "
        f"of a run and a disturbance: {attack['failed']} broke a promise."
    )


def mutations() -> str:
    """Of the recorded mutations, how many the tests kill, and why the others change nothing."""
    known = result("mutation")
    left = [each for each in known["outcomes"] if not each["killed"]]
    lines = [
        f"Of {known['mutations']} mutations (seed {known['seed']}) the fast tests nearest to them kill "
        f"{known['killed']}."
    ]
    if left:
        lines += ["The others:", "", "| file | changed to | why it survives |", "|---|---|---|"]
        lines += [
            f"| `{each['file']}` | `{each['after']}` | {each['why'] or 'no test sees it'} |".replace("||", "\\|\\|")
            for each in left
        ]
    return "\n".join(lines)


TEXTS: dict[str, Callable[[], str]] = {
    "mutations": mutations,
    "robustness": robustness,
    "workspace effect of low nets": accuracy_tables.workspace_low_nets,
    "workspace sample": accuracy_tables.workspace_sample,
    "accuracy summary": accuracy_tables.accuracy_summary,
    "accuracy of limits of other nets": accuracy_tables.accuracy_timm_amp_again,
    "accuracy on other cards": accuracy_tables.accuracy_others,
    "accuracy of xMem's first reading": accuracy_tables.accuracy_first_reading,
    "accuracy verdicts": accuracy_tables.accuracy_verdicts,
    "accuracy on this CPU": accuracy_tables.accuracy_cpu,
    "saving": saving_text,
    "long run": long_run,
    "epochs": sequence_text,
    "thousand ranks": thousand_ranks,
    "torchtitan": titan_text,
    "torchtitan registry": titan_tables.registry_text,
    "large mesh": large_mesh,
    "plan cost": plan_cost,
    "validation trace limit": validation_trace_limit,
    "story": story,
    "latentsync training": latentsync_training,
}
