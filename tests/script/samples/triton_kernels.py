"""A net between two kernels of Triton, with an autotuner of as many configurations as the first argument says."""

import sys

import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": 128 << i}) for i in range(int(sys.argv[1]))]
tried = set()


@triton.jit
def put(place, value, mask):
    tl.store(place, value, mask=mask)


@triton.autotune(configs=CONFIGS, key=["n"], restore_value=["sums"])
@triton.heuristics({"EVEN": lambda values: values["n"] % values["BLOCK"] == 0 and not tried.add(values["BLOCK"])})
@triton.jit
def scale(x_ptr, out_ptr, lengths, sums, n, factor, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + tl.load(lengths)
    x = tl.load(x_ptr + at, mask=at < n)
    place = out_ptr + at
    put(place, x * factor, at < n)
    tl.atomic_add(sums, 1)


class Scale(torch.autograd.Function):
    """Twice its input."""

    @staticmethod
    def forward(ctx, x):
        n, out = x.numel(), torch.empty_like(x)
        lengths, sums = torch.arange(1, 5, device=x.device), torch.ones(4, dtype=torch.int64, device=x.device)
        scale[lambda values: (triton.cdiv(n, values["BLOCK"]),)](x, out, lengths, sums, n, 2.0)
        assert lengths.tolist() == [1, 2, 3, 4], "a kernel reads them"
        assert sums.tolist() != [1, 1, 1, 1], "a kernel writes them"
        return out

    @staticmethod
    def backward(ctx, grad):
        n, out, lengths = grad.numel(), torch.empty_like(grad), torch.arange(4, device=grad.device)
        scale[(triton.cdiv(n, 128),)](grad.contiguous(), out, lengths, torch.zeros_like(lengths), n, 2.0)
        return out


net = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    Scale.apply(net(torch.randn(4096, 1024, device="cuda"))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert tried == {config.kwargs["BLOCK"] for config in CONFIGS}
