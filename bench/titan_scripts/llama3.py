"""The step that torchtitan's trainer ran for its table of December 2024, for bench/titan.py.

torchrun --nproc-per-node 8 bench/titan_scripts/llama3.py --size 8b --batch 2

Written after torchtitan's source at commits near that of the table, of which the trainer's own file was not read: Llama
with complex rotary embeddings and norms in float32, built on the meta device, FSDP2 for each block and for the net
(parameters in bf16, gradients reduced in float32; the last block stays gathered), checkpointing by operator, which
keeps the outputs of attention and of every second matrix product, cross entropy over float32 copies of the logits,
AdamW with its for-each implementation, clipping at 1.
"""

import argparse
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SIZES = {"8b": (4096, 32, 32, 8, 14336), "tiny": (64, 2, 4, 2, 128)}
"""Width, blocks, heads, heads of keys, width of the feed-forward."""
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


class Norm(nn.Module):
    """Root mean square, computed in float32 and given in the type of its input."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x, turns):
    """x (batch, length, heads, width) turned by complex numbers (length, width / 2)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind a norm and beside a sum."""

    def __init__(self, width, heads, groups, inner):
        super().__init__()
        self.head = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, groups * self.head, bias=False)
        self.wv = nn.Linear(width, groups * self.head, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)

    def attention(self, x, turns):
        """All earlier positions, with heads of keys and values repeated for their queries."""
        batch, length = x.shape[:2]
        q, k, v = (each(x).view(batch, length, -1, self.head) for each in (self.wq, self.wk, self.wv))
        q, k = rotated(q, turns), rotated(k, turns)
        k, v = (
            each[:, :, :, None].expand(-1, -1, -1, q.shape[2] // each.shape[2], -1).reshape(q.shape) for each in (k, v)
        )
        out = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))

    def forward(self, x, turns):
        h = x + self.attention(self.attention_norm(x), turns)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Checkpointed(nn.Module):
    """A block that keeps the outputs of attention and of every second matrix product, from the first on."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, turns):
        return checkpoint(self.block, x, turns, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts)

    def contexts(self):
        """A new count of products for each forward, and for its repetition."""
        counts = defaultdict(int)

        def policy(context, function, *args, **kwargs):
            if function is torch.ops.aten.mm.default:
                counts[context.is_recompute] += 1
                if counts[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if function in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)


class Transformer(nn.Module):
    """Logits (batch, length, words) of tokens (batch, length)."""

    def __init__(self, words, width, depth, heads, groups, inner, length):
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Checkpointed(Block(width, heads, groups, inner)) for _ in range(depth))
        self.norm = Norm(width)
        self.output = nn.Linear(width, words, bias=False)
        self.register_buffer("turns", torch.empty(length, width // heads // 2, dtype=torch.complex64))

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.output(self.norm(x))

    def init_weights(self):
        """Values for parameters and the buffer, which the meta device has not."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
        half = self.turns.shape[1]
        steps = 500000.0 ** (-torch.arange(half, device=self.turns.device) / half)
        angles = torch.outer(torch.arange(len(self.turns), device=self.turns.device), steps)
        self.turns.copy_(torch.polar(torch.ones_like(angles), angles))


def main():
    """Three steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="8b", choices=SIZES)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--words", type=int, default=128256)
    asked = parser.parse_args()
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    with torch.device("meta"):
        net = Transformer(asked.words, *SIZES[asked.size], asked.length)
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for number, layer in enumerate(net.layers):
        fully_shard(layer, **how, reshard_after_forward=number < len(net.layers) - 1)
    fully_shard(net, **how, reshard_after_forward=True)
    net.to_empty(device="cuda")
    with torch.no_grad():
        net.init_weights()
    net.train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(asked.words, (asked.batch, asked.length + 1), device="cuda")
        logits = net(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
