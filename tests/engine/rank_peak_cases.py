"""Cases whose ranks' memory is traced and measured."""

from memfit.mesh import MeshShape
from tests.engine.eight_rank_cases import EIGHT_CASES
from tests.engine.engine_case import EngineCase

BF16 = {"precision": "bf16"}
CASES = [
    EngineCase("dit", "ddp"),
    EngineCase("unet", "ddp", 2, {"clip": 1.0, "ema": 0.9}),
    EngineCase("gan", "ddp", 2),
    EngineCase("convolution", "ddp", 1, BF16),
    EngineCase("dit", "fsdp2"),
    EngineCase("dit", "fsdp2", 2, {**BF16, "clip": 1.0, "ema": 0.9}),
    EngineCase("dit", "fsdp2", 2, BF16, {"half_gather": True}),
    EngineCase("dit", "fsdp2", 2, {}, {"sync_each_micro_batch": False}),
    EngineCase("dit", "fsdp2", 2, {"clip": 1.0, "ema": 0.9}, {"cpu_offload": True}),
    EngineCase("checkpointed", "fsdp2", 1, BF16),
    EngineCase("decoder", "fsdp2", 2, {"optimizer": "sgd", "foreach": True}),
    EngineCase("unet", "fsdp2", 1, {"clip": 1.0}),
    EngineCase("convolution", "fsdp2", 2, {"ema": 0.9}),
    EngineCase("gan", "fsdp2"),
    EngineCase("gan", "fsdp2", 2),
    EngineCase("labelled dit", "fsdp2", 2),
    EngineCase("labelled dit", "fsdp2", 2, {**BF16, "clip": 1.0}, {"sync_each_micro_batch": False}),
    EngineCase("scaled logits", "fsdp2", 2),
]
ALL_CUT = {"param_persistence_threshold": 0}
ZERO_CASES = [
    EngineCase("dit", "zero1", 2, {"clip": 1.0}),
    EngineCase("unet", "zero1", 1, {"clip": 1.0, "ema": 0.9}, {"overlap_comm": True}),
    EngineCase("decoder", "zero1", 2, {"optimizer": "sgd", "foreach": True}, {"offload_optimizer": True}),
    EngineCase("dit", "zero2", 2, {**BF16, "clip": 1.0, "ema": 0.9}),
    EngineCase("unet", "zero2", 1, {}, {"reduce_bucket_size": 100_000, "allgather_bucket_size": 50_000}),
    EngineCase("convolution", "zero2", 2, {"ema": 0.9}, {"overlap_comm": True}),
    EngineCase("checkpointed", "zero2", 2, BF16, {"offload_optimizer": True}),
    EngineCase("dit", "zero3", 2, {"clip": 1.0}, ALL_CUT),
    EngineCase("dit", "zero3", 1, BF16),
    EngineCase("unet", "zero3", 2, {}, {**ALL_CUT, "reduce_bucket_size": 100_000, "prefetch_bucket_size": 20_000}),
    EngineCase("checkpointed", "zero3", 1, BF16, ALL_CUT),
    EngineCase("decoder", "zero3", 2, {"optimizer": "sgd", "foreach": True}, {**ALL_CUT, "offload_optimizer": True}),
    EngineCase("convolution", "zero3", 2, {}, {**ALL_CUT, "offload_param": True}),
    EngineCase("unet", "zero3", 2, {"clip": 1.0, "ema": 0.9}, ALL_CUT),
]

HYBRID = MeshShape(dp_replicate=2, dp_shard=2)
MESH_CASES = [
    EngineCase("dit", "fsdp2", 2, {**BF16, "clip": 1.0, "ema": 0.9}, {}, HYBRID),
    EngineCase("unet", "fsdp2", 1, {"clip": 1.0}, {}, HYBRID),
    EngineCase("dit", "fsdp2", 2, {}, {"sync_each_micro_batch": False}, HYBRID),
    EngineCase("checkpointed", "fsdp2", 1, BF16, {"half_gather": True}, HYBRID),
    EngineCase("scaled logits", "fsdp2", 2, BF16, {"half_gather": True}, HYBRID),
]
TENSOR, BOTH = MeshShape(tp=2), MeshShape(dp_shard=2, tp=2)
TENSOR_CASES = [
    EngineCase("llama", "fsdp2", 2, {}, {}, TENSOR),
    EngineCase("tied llama", "fsdp2", 1, {"precision": "bf16"}, {}, TENSOR),
    EngineCase("own", "fsdp2", 1, {}, {}, TENSOR),
    EngineCase("adapters", "fsdp2", 2, {}, {}, TENSOR),
    EngineCase("adapters in diffusers", "fsdp2", 1, {}, {}, TENSOR),
]
BOTH_CASES = [
    EngineCase("llama", "fsdp2", 1, {}, {}, BOTH),
    EngineCase("llama", "fsdp2", 2, BF16, {"half_gather": True}, BOTH),
    EngineCase("drawn", "fsdp2", 1, {}, {}, BOTH),
    EngineCase("own", "fsdp2", 2, {}, {"sync_each_micro_batch": False}, BOTH),
    EngineCase("adapters", "fsdp2", 1, BF16, {}, BOTH),
    EngineCase("scaled logits", "fsdp2", 1, {}, {}, BOTH),
]
COPIED_CUT = MeshShape(dp_replicate=2, tp=2)
COPIED_CUT_CASES = [
    EngineCase("llama", "fsdp2", 2, {}, {}, COPIED_CUT),
    EngineCase("own", "fsdp2", 1, BF16, {}, COPIED_CUT),
    EngineCase("adapters", "fsdp2", 2, {}, {}, COPIED_CUT),
    EngineCase("bert", "fsdp2", 1, {}, {}, COPIED_CUT),
    EngineCase("mixture", "fsdp2", 2, {}, {}, MeshShape(dp_replicate=2, ep=2)),
]
"""Replicas of what is cut, whose gradients are summed once a window."""
ENCODER_CASES = [
    EngineCase("bert", "fsdp2", 2, {}, {}, TENSOR),
    EngineCase("modern bert", "fsdp2", 1, BF16, {}, TENSOR),
    EngineCase("t5", "fsdp2", 2, {}, {}, TENSOR),
    EngineCase("vit", "fsdp2", 1, {}, {}, TENSOR),
    EngineCase("clip", "fsdp2", 1, {}, {}, TENSOR),
    EngineCase("whisper", "fsdp2", 1, {}, {}, TENSOR),
    EngineCase("norms of own heads", "fsdp2", 2, {}, {}, TENSOR),
    EngineCase("decoder of words", "fsdp2", 2, {}, {}, TENSOR),
    EngineCase("products", "fsdp2", 1, BF16, {}, TENSOR),
]
SHARDED_ENCODER_CASES = [
    EngineCase("bert", "fsdp2", 2, BF16, {}, BOTH),
    EngineCase("clip", "fsdp2", 1, {}, {}, BOTH),
    EngineCase("groups of queries", "fsdp2", 1, {}, {}, BOTH),
]
BUILT_IN_CUT = [
    EngineCase(net, "fsdp2", 2, {}, {}, TENSOR) for net in ("f5", "e2", "s1", "latentsync", "diffusers", "labelled dit")
]
BUILT_IN_HYBRID = [EngineCase(net, "fsdp2", 2, {}, {}, HYBRID) for net in ("f5", "s1", "latentsync", "labelled dit")]
BUILT_IN_BOTH = [EngineCase(net, "fsdp2", 2, {}, {}, BOTH) for net in ("f5", "s1", "latentsync", "labelled dit")]
BUILT_IN_CASES = [*BUILT_IN_CUT, *BUILT_IN_HYBRID, *BUILT_IN_BOTH]

DIVIDED, DIVIDED_BOTH = MeshShape(ep=2), MeshShape(dp_shard=2, ep=2)
EXPERT_CASES = [
    EngineCase("mixture", "fsdp2", 2, {}, {}, DIVIDED),
    EngineCase("shared expert", "fsdp2", 1, BF16, {}, DIVIDED),
    EngineCase("normed mixture", "fsdp2", 2, {}, {}, DIVIDED),
    EngineCase("biased experts", "fsdp2", 1, {}, {}, DIVIDED),
    EngineCase("adapted mixture", "fsdp2", 1, {}, {}, DIVIDED),
]
DIVIDED_TOKENS = {"sequence_parallel": True}
SEQUENCE_CASES = [
    EngineCase("llama", "fsdp2", 2, {}, DIVIDED_TOKENS, TENSOR),
    EngineCase("tied llama", "fsdp2", 1, BF16, DIVIDED_TOKENS, TENSOR),
    EngineCase("norms of heads", "fsdp2", 1, {}, DIVIDED_TOKENS, TENSOR),
]
SHARDED_SEQUENCE_CASES = [
    EngineCase("llama", "fsdp2", 2, BF16, {**DIVIDED_TOKENS, "half_gather": True}, BOTH),
    EngineCase("scaled embedding", "fsdp2", 1, {}, DIVIDED_TOKENS, BOTH),
]
CUT_EXPERT_CASES = [
    EngineCase("mixture", "fsdp2", 2, {}, {}, TENSOR),
    EngineCase("shared expert", "fsdp2", 1, {}, {}, TENSOR),
    EngineCase("normed mixture", "fsdp2", 1, {"precision": "bf16"}, {}, TENSOR),
]
SHARDED_CUT_EXPERT_CASES = [
    EngineCase("mixture", "fsdp2", 1, {}, {}, BOTH),
    EngineCase("shared expert", "fsdp2", 2, {}, {"sync_each_micro_batch": False}, BOTH),
]
CUT_DIVIDED, CUT_SENT = MeshShape(tp=2, ep=2), MeshShape(dp_shard_in_ep=2, tp=2)
CUT_DIVIDED_CASES = [
    EngineCase("even mixture", "fsdp2", 2, {}, {}, CUT_SENT),
    EngineCase("even mixture", "fsdp2", 1, BF16, {}, CUT_SENT),
    EngineCase("mixture", "fsdp2", 2, {}, {}, CUT_DIVIDED),
    EngineCase("shared expert", "fsdp2", 1, BF16, {}, CUT_DIVIDED),
    EngineCase("normed mixture", "fsdp2", 1, {}, {}, CUT_DIVIDED),
]
SHARDED_EXPERT_CASES = [
    EngineCase("mixture", "fsdp2", 1, {}, {}, DIVIDED_BOTH),
    EngineCase("shared expert", "fsdp2", 2, BF16, {"half_gather": True}, DIVIDED_BOTH),
    EngineCase("normed mixture", "fsdp2", 2, {}, {"sync_each_micro_batch": False}, DIVIDED_BOTH),
]
SENT, SENT_BOTH = MeshShape(dp_shard_in_ep=2), MeshShape(dp_shard=2, dp_shard_in_ep=2)
SENT_CASES = [
    EngineCase("even mixture", "fsdp2", 2, {}, {}, SENT),
    EngineCase("even mixture", "fsdp2", 1, BF16, {}, SENT),
    EngineCase("even mixture", "fsdp2", 2, {"checkpoint": "all"}, {"sync_each_micro_batch": False}, SENT),
]
SHARDED_SENT_CASES = [
    EngineCase("even mixture", "fsdp2", 1, {}, {}, SENT_BOTH),
    EngineCase("even mixture", "fsdp2", 2, BF16, {"half_gather": True}, SENT_BOTH),
    EngineCase("even mixture", "fsdp2", 2, {}, {"sync_each_micro_batch": False}, SENT_BOTH),
]
"""Ranks that send each other tokens, as many to each as a trace takes it."""
SEQUENCES, SHARDED_SEQUENCES, CUT_SEQUENCES = MeshShape(cp=2), MeshShape(dp_shard=2, cp=2), MeshShape(cp=2, tp=2)
CONTEXT_CASES = [
    EngineCase("divided llama", "fsdp2", 2, {}, {}, SEQUENCES),
    EngineCase("divided llama", "fsdp2", 1, {"checkpoint": "all"}, {}, SEQUENCES),
    EngineCase("divided llama", "fsdp2", 2, BF16, {"half_gather": True}, SEQUENCES),
    EngineCase("divided llama, adapted", "fsdp2", 2, {}, {}, SEQUENCES),
    EngineCase("divided encoder", "fsdp2", 1, {}, {}, SEQUENCES),
    EngineCase("divided losses", "fsdp2", 2, {}, {"sync_each_micro_batch": False}, SEQUENCES),
]
SHARDED_CONTEXT_CASES = [
    EngineCase("divided llama", "fsdp2", 2, {}, {}, SHARDED_SEQUENCES),
    EngineCase("divided encoder", "fsdp2", 1, BF16, {}, SHARDED_SEQUENCES),
    EngineCase("divided llama", "fsdp2", 1, {}, {}, MeshShape(dp_replicate=2, cp=2)),
    EngineCase("divided llama", "fsdp2", 2, {}, {}, CUT_SEQUENCES),
    EngineCase("divided llama, adapted", "fsdp2", 1, {}, {}, CUT_SEQUENCES),
    EngineCase("divided llama, whole attention", "fsdp2", 2, {}, {}, CUT_SEQUENCES),
]
DIVIDED_SEQUENCES = MeshShape(cp=2, ep=2)
DIVIDED_CONTEXT_CASES = [
    EngineCase("divided mixture", "fsdp2", 2, {}, {}, DIVIDED_SEQUENCES),
    EngineCase("divided mixture", "fsdp2", 1, {"checkpoint": "all"}, {}, DIVIDED_SEQUENCES),
    EngineCase("divided shared expert", "fsdp2", 2, BF16, {"half_gather": True}, DIVIDED_SEQUENCES),
    EngineCase("divided normed mixture", "fsdp2", 2, {}, {"sync_each_micro_batch": False}, DIVIDED_SEQUENCES),
    EngineCase("skewed mixture", "fsdp2", 1, {}, {}, DIVIDED_SEQUENCES),
]
"""Nets with experts that are divided, as the sequences are."""
SENT_SEQUENCES = MeshShape(dp_shard_in_ep=2, cp=2)
SENT_CONTEXT_CASES = [
    EngineCase("even divided mixture", "fsdp2", 2, {}, {}, SENT_SEQUENCES),
    EngineCase("even divided mixture", "fsdp2", 1, BF16, {"half_gather": True}, SENT_SEQUENCES),
    EngineCase(
        "even divided mixture", "fsdp2", 2, {"checkpoint": "all"}, {"sync_each_micro_batch": False}, SENT_SEQUENCES
    ),
]
"""Ranks with parts of sequences that send each other tokens, as many to each as a trace takes it."""
STAGE_CASES = [
    EngineCase("llama", "fsdp2", 4, {}, {}, MeshShape(pp=2)),
    EngineCase("drawn", "fsdp2", 2, {}, {}, MeshShape(pp=2)),
    EngineCase("llama", "fsdp2", 4, {}, {"schedule": "gpipe"}, MeshShape(pp=2)),
    EngineCase("stages", "fsdp2", 1, {}, {}, MeshShape(pp=2)),
    EngineCase("vit", "fsdp2", 4, {}, {}, MeshShape(pp=2)),
    EngineCase("decoder of words", "fsdp2", 4, BF16, {}, MeshShape(pp=2)),
    EngineCase("stages", "fsdp2", 5, BF16, {}, MeshShape(pp=3)),
    EngineCase("counted", "fsdp2", 6, {"checkpoint": "all"}, {}, MeshShape(pp=3)),
    EngineCase("llama", "fsdp2", 4, {}, {"schedule": "interleaved_1f1b"}, MeshShape(pp=2)),
    EngineCase("stages", "fsdp2", 5, BF16, {"schedule": "interleaved_1f1b"}, MeshShape(pp=2)),
    EngineCase("counted", "fsdp2", 6, {"checkpoint": "all"}, {"schedule": "interleaved_1f1b"}, MeshShape(pp=3)),
]
ZERO_BUBBLE_CASES = [
    EngineCase("llama", "fsdp2", 4, {}, {"schedule": "interleaved_zero_bubble"}, MeshShape(pp=2)),
    EngineCase("stages", "fsdp2", 5, BF16, {"schedule": "interleaved_zero_bubble"}, MeshShape(pp=2)),
    EngineCase("counted", "fsdp2", 6, {"checkpoint": "all"}, {"schedule": "interleaved_zero_bubble"}, MeshShape(pp=2)),
]
TWO_STAGES = ["net.model.embed_tokens", "net.model.layers.1"]
FOUR_STAGES = ["net.model.embed_tokens", "net.model.layers.0", "net.model.layers.1", "net.model.norm"]
PLANNED_STAGE_CASES = [
    EngineCase("llama", "fsdp2", 4, {}, {"schedule": schedule, "first_modules": first}, MeshShape(pp=2))
    for schedule, first in (
        ("gpipe", TWO_STAGES), ("interleaved_1f1b", FOUR_STAGES), ("interleaved_zero_bubble", FOUR_STAGES)
    )
]  # fmt: skip
"""Of schedules that were asked for, with the cut of their plan."""
LATE_DECODER, EARLY_DECODER = (
    {"first_modules": ["net.embed", first]} for first in ("net.head", "net.blocks.2")
)  # fmt: skip
DECODER_CASES = [
    EngineCase("decoded", "fsdp2", 4, {}, choices, MeshShape(pp=2)) for choices in ({}, LATE_DECODER, EARLY_DECODER)
]
"""A decoder at the end of the nets, cut by operations, and as a plan names the stages."""
SHARDED_STAGES = MeshShape(pp=2, dp_shard=2)
SHARDED_STAGE_CASES = [
    EngineCase("llama", "fsdp2", 4, {}, {}, SHARDED_STAGES),
    EngineCase("drawn", "fsdp2", 2, {}, {}, SHARDED_STAGES),
    EngineCase("llama", "fsdp2", 5, BF16, {"half_gather": True}, SHARDED_STAGES),
    EngineCase("counted", "fsdp2", 3, {"checkpoint": "all"}, {"schedule": "gpipe"}, SHARDED_STAGES),
    EngineCase("counted", "fsdp2", 4, {}, {"schedule": "interleaved_1f1b"}, SHARDED_STAGES),
]
COPIED_STAGES = MeshShape(pp=2, dp_replicate=2)
COPIED_STAGE_CASES = [
    EngineCase("llama", "fsdp2", 4, {}, {}, COPIED_STAGES),
    EngineCase("stages", "fsdp2", 5, BF16, {"schedule": "interleaved_1f1b"}, COPIED_STAGES),
    EngineCase("counted", "fsdp2", 3, {"checkpoint": "all"}, {"schedule": "gpipe"}, COPIED_STAGES),
    EngineCase("decoded", "fsdp2", 4, {}, EARLY_DECODER, COPIED_STAGES),
]
CUT_STAGES = MeshShape(pp=2, tp=2)
CUT_STAGE_CASES = [
    EngineCase("llama", "fsdp2", 4, {}, {}, CUT_STAGES),
    EngineCase("drawn", "fsdp2", 2, {}, {}, CUT_STAGES),
    EngineCase("llama", "fsdp2", 5, BF16, {"schedule": "interleaved_1f1b"}, CUT_STAGES),
    EngineCase("counted", "fsdp2", 3, {"checkpoint": "all"}, {"schedule": "gpipe"}, CUT_STAGES),
    EngineCase("norms of heads", "fsdp2", 4, {}, {}, CUT_STAGES),
    EngineCase("mixture", "fsdp2", 2, {}, {}, CUT_STAGES),
]
DIVIDED_STAGES = MeshShape(pp=2, ep=2)
DIVIDED_STAGE_CASES = [
    EngineCase("mixture", "fsdp2", 4, {}, {}, DIVIDED_STAGES),
    EngineCase("shared expert", "fsdp2", 3, BF16, {"schedule": "gpipe"}, DIVIDED_STAGES),
]
SENT_STAGES = MeshShape(pp=2, dp_shard_in_ep=2)
SENT_STAGE_CASES = [
    EngineCase("even mixture", "fsdp2", 4, {}, {}, SENT_STAGES),
    EngineCase("even mixture", "fsdp2", 3, BF16, {"schedule": "gpipe", "half_gather": True}, SENT_STAGES),
    EngineCase("even mixture", "fsdp2", 4, {}, {"schedule": "interleaved_1f1b"}, SENT_STAGES),
]
SEQUENCE_STAGES = MeshShape(pp=2, cp=2)
SEQUENCE_STAGE_CASES = [
    EngineCase("divided stages", "fsdp2", 4, {}, {}, SEQUENCE_STAGES),
    EngineCase("divided table", "fsdp2", 3, BF16, {"schedule": "gpipe"}, SEQUENCE_STAGES),
    EngineCase("divided stages", "fsdp2", 4, {}, {"schedule": "interleaved_1f1b"}, SEQUENCE_STAGES),
    EngineCase(
        "recomputed sequences", "fsdp2", 2, {**BF16, "checkpoint": "all"}, {"half_gather": True}, SEQUENCE_STAGES
    ),
]
EVERY_CASE = [
    *CASES, *ZERO_CASES, *MESH_CASES, *TENSOR_CASES, *BOTH_CASES, *BUILT_IN_CASES, *STAGE_CASES, *ZERO_BUBBLE_CASES,
    *DECODER_CASES, *PLANNED_STAGE_CASES, *ENCODER_CASES, *SHARDED_ENCODER_CASES, *COPIED_CUT_CASES,
    *SHARDED_STAGE_CASES, *COPIED_STAGE_CASES, *CUT_STAGE_CASES, *DIVIDED_STAGE_CASES, *CUT_DIVIDED_CASES,
    *SEQUENCE_STAGE_CASES, *SENT_STAGE_CASES,
    *EXPERT_CASES, *SHARDED_EXPERT_CASES, *SENT_CASES, *SHARDED_SENT_CASES, *CUT_EXPERT_CASES,
    *SHARDED_CUT_EXPERT_CASES, *SEQUENCE_CASES, *SHARDED_SEQUENCE_CASES, *CONTEXT_CASES, *SHARDED_CONTEXT_CASES,
    *DIVIDED_CONTEXT_CASES, *SENT_CONTEXT_CASES,
    *EIGHT_CASES,
]  # fmt: skip
