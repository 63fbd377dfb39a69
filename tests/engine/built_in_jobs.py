"""Built-in jobs and a net of diffusers in their smallest forms, for real ranks: no weight is zero, steps are SGD's."""

import torch

from memfit.job import Loss, Shape
from memfit.jobs.f5_tts import E2Base, F5Tiny
from memfit.jobs.gpt_sovits_s1 import S1
from memfit.jobs.latentsync_tiny import LatentSyncTiny
from memfit.jobs.nets.dit import UNetT
from testing.nets import UNet


class Plain:
    """Comes before a job: its steps are proportional to gradients, so that a gradient of 0 but for rounding is none."""

    seed = 6
    clip: float | None = 0.5
    ema: float | None = 0.9

    def nets(self):
        torch.manual_seed(self.seed)
        nets = super().nets()
        with torch.no_grad():
            for net in nets.values():
                for parameter in net.parameters():
                    parameter.add_(torch.randn(parameter.shape) * 0.02)
        return nets

    def optimizers(self, nets):
        return {
            name: torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
            for name, net in nets.items()
            if any(p.requires_grad for p in net.parameters())
        }


class Speech(Plain, F5Tiny):
    dim: int = 64
    depth: int = 2
    vocabulary: int = 32
    longest: int | None = 24


class FlatUNet(Plain, E2Base):
    """E2 TTS's net."""

    dropout: float = 0.0
    vocabulary: int = 32
    longest: int | None = 24
    draws: str = "sample"

    def _net(self):
        return UNetT(dim=32, depth=4, num_heads=2, head_dim=16, dropout=0.0, vocabulary=32)


class Tokens(S1):
    """GPT-SoVITS's first stage with its own optimizer."""

    precision: str = "fp32"
    dim: int = 64
    depth: int = 2
    dropout: float = 0.0
    clip_seconds: float = 0.5
    wrapper: str = "none"


class PlainTokens(Plain, Tokens):
    pass


class Faces(Plain, LatentSyncTiny):
    """The U-Net with its attention, motion modules and GEGLU, judged by its noise alone."""

    frames: int = 2
    pixel_space_supervise: bool = False
    sync_weight: float = 0.0
    perceptual_weight: float = 0.0
    trepa_weight: float = 0.0
    validation_frames: int = 8
    inference_steps: int = 1


class Diffused(Plain, UNet):
    """diffusers' own U-Net with the noise of its batch."""

    def loss(self, nets, batch):
        steps = torch.zeros(len(batch["x"]), dtype=torch.long)
        out = nets["unet"](batch["x"], steps, batch["c"]).sample
        return Loss((out - 1).square().mean((1, 2, 3)).sum(), len(out))


class Labelled(Plain, UNet):
    """diffusers' DiT, which calls an embedding of its first block by itself."""

    def nets(self):
        torch.manual_seed(self.seed)
        from diffusers import DiTTransformer2DModel

        net = DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
            patch_size=2, num_embeds_ada_norm=10,
        )  # fmt: skip
        for block in net.transformer_blocks:
            block.norm1.emb.class_embedder.dropout_prob = 0.0
        return {"dit": net}

    def batch(self, shape):
        return {"x": torch.randn(shape.items, 4, 8, 8), "label": torch.arange(shape.items) % 10}

    def loss(self, nets, batch):
        steps = torch.zeros(len(batch["x"]), dtype=torch.long)
        out = nets["dit"](batch["x"], timestep=steps, class_labels=batch["label"]).sample
        return Loss((out - 1).square().mean((1, 2, 3)).sum(), len(out))


class Video(Plain, UNet):
    """diffusers' CogVideoX, whose attention has norms of single heads."""

    def nets(self):
        torch.manual_seed(self.seed)
        from diffusers import CogVideoXTransformer3DModel

        net = CogVideoXTransformer3DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=8,
            text_embed_dim=16, num_layers=2, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
            max_text_seq_length=8,
        )  # fmt: skip
        return {"video": net}

    def batch(self, shape):
        return {"x": torch.randn(shape.items, 2, 4, 8, 8), "text": torch.randn(shape.items, 8, 16)}

    def loss(self, nets, batch):
        steps = torch.zeros(len(batch["x"]), dtype=torch.long)
        out = nets["video"](batch["x"], batch["text"], steps).sample
        return Loss((out - 1).square().mean((1, 2, 3, 4)).sum(), len(out))


class Joint(Plain, UNet):
    """diffusers' Qwen-Image, whose attention has a second stream of layers for the text."""

    def nets(self):
        torch.manual_seed(self.seed)
        from diffusers import QwenImageTransformer2DModel

        net = QwenImageTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=16, out_channels=4, num_layers=2,
            joint_attention_dim=16, axes_dims_rope=(2, 2, 4),
        )  # fmt: skip
        return {"image": net}

    def batch(self, shape):
        return {"x": torch.randn(shape.items, 16, 16), "text": torch.randn(shape.items, 8, 16)}

    def loss(self, nets, batch):
        steps, sizes = torch.full((len(batch["x"]),), 0.5), [[(1, 4, 4)]] * len(batch["x"])
        out = nets["image"](batch["x"], batch["text"], timestep=steps, img_shapes=sizes).sample
        return Loss((out - 1).square().mean((1, 2)).sum(), len(out))


class NormedVideo(Plain, UNet):
    """diffusers' Wan, whose attention has norms over all heads: its feed-forward is cut."""

    def nets(self):
        torch.manual_seed(self.seed)
        from diffusers import WanTransformer3DModel

        net = WanTransformer3DModel(
            num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
            ffn_dim=64, num_layers=2, rope_max_seq_len=32,
        )  # fmt: skip
        return {"video": net}

    def batch(self, shape):
        return {"x": torch.randn(shape.items, 4, 2, 8, 8), "text": torch.randn(shape.items, 8, 16)}

    def loss(self, nets, batch):
        out = nets["video"](batch["x"], torch.full((len(batch["x"]),), 500.0), batch["text"]).sample
        return Loss((out - 1).square().mean((1, 2, 3, 4)).sum(), len(out))


class GroupedImage(Plain, UNet):
    """diffusers' Lumina 2, whose groups of queries share keys and values."""

    def nets(self):
        torch.manual_seed(self.seed)
        from diffusers import Lumina2Transformer2DModel

        net = Lumina2Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, hidden_size=32, num_layers=2, num_refiner_layers=1,
            num_attention_heads=4, num_kv_heads=2, multiple_of=8, axes_dim_rope=(4, 2, 2), axes_lens=(16, 16, 16),
            cap_feat_dim=16,
        )  # fmt: skip
        return {"image": net}

    def batch(self, shape):
        return {"x": torch.randn(shape.items, 4, 8, 8), "text": torch.randn(shape.items, 8, 16)}

    def loss(self, nets, batch):
        count = len(batch["x"])
        mask = torch.ones(count, 8, dtype=torch.bool)
        out = nets["image"](batch["x"], torch.full((count,), 0.5), batch["text"], mask).sample
        return Loss((out - 1).square().mean((1, 2, 3)).sum(), count)


class NormedAcrossHeads(UNet):
    """Attention with norms over all heads together, which are not carried."""

    def nets(self):
        from diffusers.models.attention_processor import Attention

        return {"unet": Attention(16, heads=2, kv_heads=2, dim_head=8, qk_norm="rms_norm_across_heads")}


class OddHeads(Speech):
    dim: int = 96


class OddTokens(Tokens):
    dim: int = 96


CARRIED = {
    "f5": Speech,
    "e2": FlatUNet,
    "s1": PlainTokens,
    "latentsync": Faces,
    "diffusers": Diffused,
    "labelled dit": Labelled,
    "video": Video,
    "joint": Joint,
    "normed video": NormedVideo,
    "grouped image": GroupedImage,
}
REFUSED = {
    NormedAcrossHeads: "module unet.norm_q on tp=2: its layout is not carried",
    OddHeads: "module dit.transformer_blocks.0.attn on tp=2: 3 heads do not divide by it",
    OddTokens: "net 'gpt' on tp=2: 3 heads (dim / 32) do not divide by it",
}


def batches(kind):
    """A function of sizes: micro-batches of the job, the same on every rank."""

    def parts(sizes):
        torch.manual_seed(5)
        job = kind()
        return [job.batch(Shape(items=items, length=job.longest)) for items in sizes]

    return parts
