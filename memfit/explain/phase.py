"""Tells from a traceback in which part of training memory ran out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memfit.explain.evidence import Frame

LOADING, VALIDATION, OPTIMIZER, BACKWARD, FORWARD = "loading", "validation", "optimizer step", "backward", "forward"
_LOADING = re.compile(
    r"^(?:load|load_state_dict|torch_load|from_pretrained|_load_from_state_dict|cuda|_apply|to|to_empty)$"
)
_VALIDATION = re.compile(r"valid|evaluat|^eval|_eval\b|eval_|inference|predict|generate|^test$|test_step|sample_images")
_STEP = re.compile(r"^(?:step|_step|optimizer_step|_init_group|_multi_tensor_\w+|_single_tensor_\w+|_fused_\w+)$")


def step_part(frames: Sequence[Frame]) -> str | None:
    """loading, validation, optimizer step, backward or forward; None where the frames do not tell."""
    own = [frame for frame in frames if not frame.is_library]
    if any(_VALIDATION.search(frame.function.lower()) for frame in own):
        return VALIDATION
    if any("/torch/optim/" in frame.file and _STEP.match(frame.function) for frame in frames):
        return OPTIMIZER
    if any(frame.function == "backward" or ".backward(" in frame.text for frame in frames):
        return BACKWARD
    if any("optim" in frame.text and ".step(" in frame.text for frame in own[-1:]):
        return OPTIMIZER
    in_function = bool(frames) and "/torch/nn/functional.py" in frames[-1].file
    if in_function or any(frame.function in ("forward", "_call_impl", "__call__") for frame in frames):
        return FORWARD
    if any(_LOADING.match(frame.function) for frame in frames if frame.is_library):
        return LOADING
    if own and re.search(r"\.cuda\(|\.to\(|torch\.load\(|from_pretrained\(", own[-1].text):
        return LOADING
    return None


def makes_logits(frames: Sequence[Frame]) -> bool:
    """Whether the innermost lines compute a cross entropy, whose logits are often the largest tensor of a step."""
    last = frames[-4:]
    return any(re.search(r"cross_entropy|log_softmax|nll_loss|CrossEntropy", f"{f.function} {f.text}") for f in last)


def attends(frames: Sequence[Frame]) -> bool:
    """Whether the innermost lines compute attention by its full matrix of scores."""
    last = frames[-3:]
    return any(re.search(r"softmax|bmm|baddbmm|matmul|attn_weights|attention_scores", f.text) for f in last) and any(
        re.search(r"atten|attn", f"{f.function} {f.file} {f.text}".lower()) for f in frames[-6:]
    )
