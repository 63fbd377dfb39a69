"""ScaledAdam (Yao et al. 2023, "Zipformer"): Adam whose update of a tensor is proportional to the tensor's own size.

Tensors of one shape are stepped together, stacked: a step needs a copy of the parameters and of the gradients for as
long as it lasts. Each stack's state is ``delta`` and ``exp_avg_sq`` of the stack's size, and per-tensor scalars for the
size, which has its own, slower, update every ``size_period`` steps. Gradients are clipped at ``clipping`` times the
median norm of the last ``clipping_period`` steps, once there are so many. No decision is taken on a tensor's value.
Parameters may be DTensors, parts of which are on other ranks: sizes and norms are those of whole tensors.

Not done: sparse gradients, reports of dominant parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class ScaledAdam(Optimizer):
    """See the module."""

    dtensor_step: ClassVar[bool] = True
    """See ``memfit.engine.refusals``."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.03,
        betas: tuple[float, float] = (0.9, 0.98),
        *,
        clipping: float = 2.0,
        scalar_lr_scale: float = 0.1,
        eps: float = 1e-8,
        min_rms: float = 1e-5,
        max_rms: float = 3.0,
        scalar_max: float = 10.0,
        size_period: int = 4,
        clipping_period: int = 100,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "clipping": clipping, "scalar_lr_scale": scalar_lr_scale, "eps": eps,
            "min_rms": min_rms, "max_rms": max_rms, "scalar_max": scalar_max, "size_period": size_period,
            "clipping_period": clipping_period,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            same_shape: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.requires_grad:
                    key = (str(parameter.dtype), *parameter.shape)
                    same_shape[key].append(parameter)
            members = [same_shape[key] for key in sorted(same_shape, key=str)]
            stacks = [
                (torch.stack(some), torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in some]))
                for some in members
            ]
            states = [self.state[some[0]] for some in members]
            scale = self._clipping(group, states, stacks)
            if "model_norms" not in states[0]:
                device = stacks[0][0].device
                norms = torch.zeros(group["clipping_period"], device=device)
                states[0].update(model_norms=norms, threshold=torch.zeros((), device=device))
            for state, (stack, gradient) in zip(states, stacks, strict=True):
                if "step" not in state:
                    _start(state, stack, group["size_period"])
                _step_stack(group, state, stack, gradient if scale is None else gradient * scale)
            for some, (stack, _) in zip(members, stacks, strict=True):
                for parameter, value in zip(some, stack.unbind(), strict=True):
                    parameter.copy_(value)
        return loss

    def _clipping(
        self, group: dict[str, Any], states: list[dict[str, Any]], stacks: list[tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """The factor, at most 1, for all gradients; None while there is no median yet."""
        first, period = states[0], group["clipping_period"]
        step = first.get("step", 0)
        if step == 0:
            return None
        total = torch.zeros((), device=stacks[0][0].device)
        for state, (_, gradient) in zip(states, stacks, strict=True):
            total += _whole(((gradient * state["param_rms"] if "param_rms" in state else gradient) ** 2).sum())
        norm = total.sqrt()
        first["model_norms"][step % period] = norm
        if step % period == 0:
            first["threshold"] = group["clipping"] * first["model_norms"].sort()[0][period // 2]
        return (first["threshold"] / (norm + 1e-20)).clamp(max=1.0) if step >= period else None


def _start(state: dict[str, Any], stack: Tensor, size_period: int) -> None:
    state["step"] = 0
    state["delta"] = torch.zeros_like(stack)
    if stack[0].numel() > 1:
        state["param_rms"] = _rms(stack)
        state["scale_exp_avg_sq"] = torch.zeros_like(state["param_rms"])
        state["scale_grads"] = state["param_rms"].new_zeros(size_period, *state["param_rms"].shape)
    state["exp_avg_sq"] = torch.zeros_like(stack)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _rms(stack: Tensor) -> Tensor:
    """Root of the mean square of each tensor of the stack, kept to broadcast. A sum, since parts of a DTensor may have
    different sizes, of whose means it would take the mean."""
    return ((stack**2).sum(dim=list(range(1, stack.ndim)), keepdim=True) / stack[0].numel()).sqrt()


def _step_stack(group: dict[str, Any], state: dict[str, Any], stack: Tensor, gradient: Tensor) -> None:
    (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
    step, delta, period = state["step"], state["delta"], group["size_period"]
    delta.mul_(beta1)
    tensors = "param_rms" in state
    if tensors:
        dims = list(range(1, stack.ndim))
        state["scale_grads"][step % period] = (stack * gradient).sum(dim=dims, keepdim=True)
        if step % period == period - 1:
            state["param_rms"].copy_(_rms(stack))
            if step > 0:
                _resize(group, state, stack)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    correction = 1 - beta2 ** (step + 1)
    second = state["exp_avg_sq"] / correction if correction < 0.99 else state["exp_avg_sq"]
    update = gradient / second.sqrt().add_(eps)
    if tensors:
        delta.add_(update * (-lr * (1 - beta1) * state["param_rms"].clamp(min=group["min_rms"])))
    else:
        delta.add_(update, alpha=-lr * (1 - beta1) * group["scalar_lr_scale"])
        stack.clamp_(-group["scalar_max"], group["scalar_max"])
    stack.add_(delta)
    state["step"] = step + 1


def _resize(group: dict[str, Any], state: dict[str, Any], stack: Tensor) -> None:
    """Adam on the logarithm of each tensor's size, kept between the smallest and the largest rms."""
    (beta1, beta2), period = group["betas"], group["size_period"]
    size_lr, slow = group["lr"] * group["scalar_lr_scale"], beta2**period
    average = state["scale_exp_avg_sq"]
    average.mul_(slow).add_((state["scale_grads"] ** 2).mean(dim=0), alpha=1 - slow)
    correction = 1 - slow ** ((state["step"] + 1) // period)
    change = -size_lr * correction**0.5 * state["scale_grads"].sum(dim=0) / (average.sqrt() + group["eps"])
    change = change.masked_fill(state["param_rms"] < group["min_rms"], 0.0)
    change = change.masked_fill(state["param_rms"] > group["max_rms"], -size_lr * period)
    state["delta"].add_(stack * change, alpha=1 - beta1)
