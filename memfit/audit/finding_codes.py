"""The codes of findings, which stay, and the usual cure of each."""

CURES = {
    "double-sharding": (
        "The sampler shards by rank and the framework shards it again: tell one of them not to (Lightning: "
        "Trainer(use_distributed_sampler=False); Accelerate: prepare a loader whose sampler does not shard)."
    ),
    "no-sharding": (
        "Give each rank its part: a DistributedSampler, or a sampler that takes every world-th batch from its rank on."
    ),
    "same-shard": "Pass each process its own rank, not a constant.",
    "ranks-disagree": "Shuffle with a generator seeded alike on every rank (seed + epoch), then take the rank's part.",
    "same-order": (
        "Call set_epoch(epoch) before each epoch on the sampler that shuffles, also through what wraps it, and seed "
        "the shuffle with seed + epoch."
    ),
    "unequal-counts": (
        "Give every rank the same number of batches: split, pad or drop the last ones alike on all ranks."
    ),
    "silent-drops": "Raise an error that names the samples, widen the limit, or leave them out by name beforehand.",
    "over-sampling": "Pad only the last step, not every bucket, or weight the loss by how often a sample is given.",
    "replaced-samples": (
        "Raise on a sample that cannot be read, or leave it out of the data set by name; draw without replacement."
    ),
    "step-never-comes": "Step when (batch_idx + 1) % accumulation == 0, and at the end of the epoch.",
    "uneven-windows": (
        "Count (batch_idx + 1) % accumulation, and step at the end of the epoch, so that nothing leaks into the next."
    ),
    "step-counts-micro-batches": (
        "Step, and count steps, only when gradients are synchronised: enter accelerator.accumulate(), or test the "
        "micro-batch's number."
    ),
    "global-given-as-per-gpu": (
        "Divide the global batch by the number of ranks (and of micro-batches) once, per loader."
    ),
    "per-gpu-given-as-global": "The global batch is the per-GPU batch times the ranks: divide it once, not twice.",
    "frames-taken-for-samples": (
        "Say the unit with the number: a loader's batch_size counts samples; frames need a sampler that packs by "
        "length."
    ),
}
"""Every code, and its usual cure."""
