"""Nets that are cut into stages by their jobs, and those that cannot be cut."""

import os
import signal

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import OlmoeConfig, OlmoeForCausalLM

from memfit.job import Loss, Turn
from tests.engine.encoder_jobs import T5
from tests.engine.tensor_jobs import HEADS, SIZES, Own, Tied, Unplanned, Words, words


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x, scale=None):
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + (y if scale is None else y * scale)


class Stacked(nn.Module):
    """Blocks that take the positions' scale too; what lies between them and the head is no module's."""

    def __init__(self, width=24, blocks=5):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(2 * width, 32)

    def scale(self, tokens, x):
        return torch.linspace(0.5, 1, tokens.shape[1], device=x.device)[:, None]

    def forward(self, tokens):
        x = self.embed(tokens) * 2
        scale = self.scale(tokens, x)
        for block in self.blocks:
            x = block(x, scale=scale)
        return self.head(torch.cat([x, x.square()], -1))


class Stages(Own):
    """A net of its own, which its job cuts; it draws, and has two groups of parameters."""

    clip: float | None = None
    Net = Stacked

    def nets(self):
        torch.manual_seed(3)
        return {"net": self.Net()}

    def optimizers(self, nets):
        flat = [p for p in nets["net"].parameters() if p.dim() == 1]
        wide = [p for p in nets["net"].parameters() if p.dim() > 1]
        return {"net": torch.optim.AdamW([{"params": wide}, {"params": flat, "weight_decay": 0.0}], lr=0.01)}

    def loss(self, nets, batch):
        kept = torch.rand(batch.shape[0], 5, device=batch.device) > 0.2
        logits = nets["net"](batch)[:, :-1].flatten(0, 1)
        terms = nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none")
        return Loss((terms * kept.flatten()).sum(), kept.sum())

    def pipeline(self, nets):
        return ["net.embed", *(f"net.blocks.{i}" for i in range(len(nets["net"].blocks))), "net.head"]

    def parallelize(self, nets, mesh):
        for block in nets["net"].blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class Counted(Stages):
    """Units are known before the forward; a frozen net beside the one that is cut; nothing is drawn; it validates."""

    def nets(self):
        return {**super().nets(), "frozen": nn.Linear(6, 6).requires_grad_(False)}

    def units(self, batch):
        return 5 * len(batch)

    def loss(self, nets, batch):
        weight = nets["frozen"](batch.float()).sigmoid()[:, 1:]
        logits = nets["net"](batch)[:, :-1].transpose(1, 2)
        terms = nn.functional.cross_entropy(logits, batch[:, 1:], reduction="none")
        return Loss((terms * weight).sum(), 5 * len(batch))

    def validation_dataset(self):
        return [row for part in words([6]) for row in part]

    def validate(self, nets, batch):
        return {"loss": self.loss(nets, batch).sum / (5 * len(batch))}


class Gated(Counted):
    """Each block has a single number that is trained; clipped."""

    clip: float | None = 0.5

    class Net(Stacked):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(GatedResidual(24) for _ in range(5))

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}


class GatedResidual(Residual):
    def __init__(self, width):
        super().__init__(width)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, scale):
        return super().forward(x, scale * self.gate)


class Image(nn.Module):
    """Hidden states of 6 tokens to an image of 2 x 3."""

    def __init__(self, width, channels):
        super().__init__()
        self.out = nn.Linear(width, channels)

    def forward(self, x):
        return self.out(x).transpose(1, 2).unflatten(2, (2, 3))


class Upsampled(nn.Module):
    """Twice as high and wide, then normalised, and a convolution."""

    def __init__(self, channels, out):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)

    def forward(self, x):
        x = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv(nn.functional.silu(self.norm(x)))


class Decoder(nn.Module):
    """Wide blocks that multiply matrices, and a decoder at the end: few products, much memory traffic."""

    def __init__(self, width, blocks, channels, ups):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.image = Image(width, channels)
        self.ups = nn.ModuleList(Upsampled(channels, channels) for _ in range(ups))
        self.head = Upsampled(channels, 1)

    def forward(self, tokens):
        x = self.embed(tokens)
        for module in (*self.blocks, self.image, *self.ups, self.head):
            x = module(x)
        return x


class Decoded(Own):
    """An image decoder after transformer-like blocks, as a VAE's decoder after a denoiser."""

    clip: float | None = None
    width: int = 24
    blocks: int = 5
    channels: int = 8
    ups: int = 3

    def nets(self):
        torch.manual_seed(3)
        return {"net": Decoder(self.width, self.blocks, self.channels, self.ups)}

    def loss(self, nets, batch):
        image = nets["net"](batch)
        target = batch.float().mean(1) / 32
        return Loss((image - target[:, None, None, None]).square().mean((1, 2, 3)).sum(), len(batch))

    def pipeline(self, nets):
        net = nets["net"]
        lists = {"blocks": net.blocks, "ups": net.ups}
        numbered = {name: [f"net.{name}.{i}" for i in range(len(modules))] for name, modules in lists.items()}
        return ["net.embed", *numbered["blocks"], "net.image", *numbered["ups"], "net.head"]

    def parallelize(self, nets, mesh):
        for block in nets["net"].blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


STAGED = {"stages": Stages, "counted": Counted, "decoded": Decoded}


class Outside(Stages):
    """A trained parameter that no module of the pipeline holds."""

    class Net(Stacked):
        def __init__(self):
            super().__init__()
            self.scales = nn.Linear(1, 1)

        def scale(self, tokens, x):
            return self.scales(super().scale(tokens, x))


class Shifted(Stages):
    """A trained parameter of the net itself, which no hook can name."""

    class Net(Stacked):
        def __init__(self):
            super().__init__()
            self.shift, self.fixed = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1), requires_grad=False)

        def scale(self, tokens, x):
            return super().scale(tokens, x) + self.shift


class Conditioned(Stages):
    """Every block is given what a module of the first stage gives."""

    class Net(Stacked):
        def scale(self, tokens, x):
            return x.mean(1, keepdim=True)


class Reading(Stages):
    class Net(Stacked):
        def scale(self, tokens, x):
            return float(x.detach().mean())


class Skipping(Stages):
    """The loss is given a hidden state of the first stage."""

    class Net(Stacked):
        def forward(self, tokens):
            return super().forward(tokens) + self.embed.weight.new_zeros(()) + self.kept

        def scale(self, tokens, x):
            self.kept = x.mean()
            return super().scale(tokens, x)


class Twice(Stages):
    def loss(self, nets, batch):
        first = super().loss(nets, batch)
        return Loss(first.sum + super().loss(nets, batch).sum, first.units)


class Backwards(Stages):
    def pipeline(self, nets):
        return list(reversed(super().pipeline(nets)))


class Nested(Stages):
    def pipeline(self, nets):
        return [*super().pipeline(nets)[:-1], "net.blocks.4.up", "net.head"]


class Misnamed(Stages):
    def pipeline(self, nets):
        return ["net.embed", "net.block.0"]


class Scaled(Stages):
    precision = "fp16"


class Turned(Stages):
    def turns(self, optimizers):
        return [
            Turn(name=name, loss=lambda nets, batch, shared: self.loss(nets, batch), optimizers=("net",))
            for name in "ab"
        ]


class Grouped(Stages):
    """Another number of groups where a stage has no flat parameters of its own."""

    def optimizers(self, nets):
        groups = [{"params": [p]} for p in nets["net"].parameters()]
        return {"net": torch.optim.AdamW(groups, lr=0.01)}


class Torn(Own):
    """A layer that is cut by columns at the end of one module of the pipeline, and by rows in the next."""

    def pipeline(self, nets):
        return [f"net.{number}" for number in range(6)]


class TornDTensor(Torn):
    def parallelize(self, nets, mesh):
        columns, rows = ColwiseParallel(use_local_output=False), RowwiseParallel()
        parallelize_module(nets["net"], mesh, {"1": columns, "3": rows})


class HeadOnly(Words):
    """A net of which transformers names the head alone, and whose blocks a forward shows."""

    def nets(self):
        torch.manual_seed(2)
        config = OlmoeConfig(**SIZES, **HEADS, num_experts=4, num_experts_per_tok=2)
        return {"net": OlmoeForCausalLM(config)}


class Unnamed(Words):
    """A net of its own, and no job that says in which order its modules run."""

    def nets(self):
        return {"net": self.net()}

    def loss(self, nets, batch):
        return Loss(nets["net"](batch).square().mean((1, 2)).sum(), len(batch))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(32, 24), Residual(24), Residual(24)])


class Reused(Unnamed):
    """Its blocks run twice."""

    class Repeated(Blocks):
        def forward(self, tokens):
            x = self.blocks[0](tokens)
            for _ in range(2):
                x = self.blocks[2](self.blocks[1](x))
            return x

    net = Repeated


class Branched(Unnamed):
    """Each block is given the embeddings too."""

    class Skips(Blocks):
        def forward(self, tokens):
            x = embedded = self.blocks[0](tokens)
            for block in self.blocks[1:]:
                x = block(x) + embedded
            return x

    net = Skips


class Few(Stages):
    def pipeline(self, nets):
        return ["net.blocks.0"]


REFUSED = {
    Unplanned: "net 'net' on pp=2: transformers has no pipeline plan for MambaForCausalLM",
    Tied: "module net.lm_head on pp=2: it shares a parameter with net.model.embed_tokens",
    Outside: "module net.scales on pp=2: it holds trained parameters outside of the modules that run",
    Shifted: "module net on pp=2: it holds trained parameters outside of the modules that run in order: shift; "
    "move them into a module of their own that runs in order, or leave pp out of the mesh",
    Conditioned: "on pp: it is given what a module of an earlier stage gives, beside the tensor",
    Reading: "its value is read, and another stage computes it",
    Skipping: "the loss on pp: it depends on what a module of an earlier stage gives",
    Twice: "module net.embed on pp: it is called after net.head",
    Backwards: "on pp: it is called after",
    Nested: "module net.blocks.4.up on pp=2: net.blocks.4, which holds it, is named too",
    Misnamed: "module 'net.block.0'",
    Scaled: "precision=fp16 on pp=2: each stage would scale its gradients by itself",
    Turned: "Turned.turns() on pp=2: a window has 2 turns",
    Grouped: "optimizer 'net' on pp: its groups of parameters are others",
    Reused: "net 'net' on pp=2: transformers has no pipeline plan for Repeated, and no list of blocks of it runs once",
    Branched: "1 modules that run one after the other: from net.blocks.1 on, more of those before is needed",
    T5: "module net.shared on pp=2: it holds trained parameters outside of the modules that run in order",
    Few: "pp=2: the nets have 1 modules that run one after the other",
}
"""What is said of each; where only one stage meets it, of that stage."""


class Disturbed(Counted):
    """In its sixth loss a rank is killed, or has no memory; once, which ``mark`` tells. It has to hold the last stage:
    others come to no loss."""

    fails: str = ""
    failing_rank: int = 1
    mark: str = ""
    validate_every: int = 2
    windows: int = 4

    def loss(self, nets, batch):
        given = super().loss(nets, batch)
        self.calls = getattr(self, "calls", 0) + 1
        if (
            self.fails
            and os.environ.get("RANK") == str(self.failing_rank)
            and self.calls >= 6
            and not os.path.exists(self.mark)
        ):
            open(self.mark, "w").close()
            if self.fails == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("planted")
        return given
