"""What each project calls an option: setting or choice of a plan -> the key or line to change there.

``{value}`` stands for the plan's value and ``{variant}`` for what follows the slash of the job's name. Where a value
is no number to fill in, its words are listed. Keys that begin with ``recompute`` and a path are for modules under that
path which the project's own switch leaves alone. Keys were read in the projects' configuration files: LatentSync's
configs/unet/stage1.yaml, MuseTalk's configs/training (d6cb984, 403ad78), F5-TTS's F5TTS_v1_Base.yaml (2daa1c5),
GPT-SoVITS's s1longer-v2.yaml (af2d119) and s2.json (19dfdfc).
"""

from __future__ import annotations

from collections.abc import Mapping

Upstream = Mapping[str, str | Mapping[str, str]]

_ALLOCATOR = "environment: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"

_LS_CONFIG = "configs/unet/{variant}.yaml"
_LS_TRAIN = "scripts/train_unet.py"
_LS_PIPELINE = "latentsync/pipelines/lipsync_pipeline.py"

LATENTSYNC: Upstream = {
    "micro_batch": f"{_LS_CONFIG}: data.batch_size: {{value}}",
    "accumulation": f"{_LS_TRAIN}: it has none; step on every batch number {{value}}, with loss / {{value}}, and the "
    "others under unet.no_sync()",
    "frames": f"{_LS_CONFIG}: data.num_frames: {{value}}",
    "resolution": f"{_LS_CONFIG}: data.resolution: {{value}}",
    "checkpointing": f"{_LS_CONFIG}: run.enable_gradient_checkpointing: {{value}}",
    "recompute unet.mid_block": "latentsync/models/unet_blocks.py: UNetMidBlock3DCrossAttn.forward calls each part "
    "through torch.utils.checkpoint.checkpoint",
    "recompute lpips": f"{_LS_TRAIN}: torch.utils.checkpoint.checkpoint around the call of lpips_loss_func",
    "precision": {
        "fp16": f"{_LS_CONFIG}: run.mixed_precision_training: true",
        "fp32": f"{_LS_CONFIG}: run.mixed_precision_training: false",
        "bf16": f"{_LS_TRAIN}: torch.autocast(device_type='cuda', dtype=torch.bfloat16), without the GradScaler",
    },
    "optimizer": f"{_LS_TRAIN}: torch.optim.AdamW(trainable_params, lr=config.optimizer.lr, {{value}}=True)",
    "wrapper": {
        "none": f"{_LS_TRAIN}: no DDP(unet, ...) for one process; for several, gradient_as_bucket_view=True",
    },
    "zero_grad": f"{_LS_TRAIN}: optimizer.zero_grad(set_to_none=True) right after optimizer.step()",
    "free_gradients": f"{_LS_TRAIN}: optimizer.zero_grad(set_to_none=True) before pipeline(...)",
    "validation_decode": f"{_LS_PIPELINE}: decode_latents over slices of {{value}} frames",
    "validation_keeps": f"{_LS_PIPELINE}: synced_video_frames.append(decoded_latents.cpu()); faces stay on the CPU",
    "validation_judge": "eval/syncnet/syncnet_eval.py: SyncNetEval.evaluate(..., batch_size={value})",
    "validation_frames": f"{_LS_CONFIG}: data.val_video_path: a video of {{value}} frames, 25 a second",
    "pixel_space_supervise": f"{_LS_CONFIG}: run.pixel_space_supervise: {{value}}",
    "sync_weight": f"{_LS_CONFIG}: run.sync_loss_weight: {{value}} (0: run.use_syncnet: false)",
    "perceptual_weight": f"{_LS_CONFIG}: run.perceptual_loss_weight: {{value}}",
    "trepa_weight": f"{_LS_CONFIG}: run.trepa_loss_weight: {{value}} (0: its net is not loaded)",
    "trained": {
        "all": f"{_LS_CONFIG}: run.trainable_modules: the whole U-Net",
        "motion+attentions": f"{_LS_CONFIG}: run.trainable_modules: [motion_modules., attentions.]",
        "motion+attn2": f"{_LS_CONFIG}: run.trainable_modules: [motion_modules., attn2.]",
    },
    "motion": {
        "none": f"{_LS_CONFIG}: model.use_motion_module: false",
        "decoder": f"{_LS_CONFIG}: model.motion_module_decoder_only: true",
        "all": f"{_LS_CONFIG}: model.motion_module_decoder_only: false",
    },
    "devices": "torchrun --nproc_per_node={value} -m scripts.train_unet",
    "expandable_allocator": _ALLOCATOR,
}

_MT_CONFIG = "configs/training/{variant}.yaml"
_MT_MODELS = "musetalk/utils/training_utils.py"
_MT_LAUNCH = "configs/training/gpu.yaml"

MUSETALK: Upstream = {
    "micro_batch": f"{_MT_CONFIG}: data.train_bs: {{value}}",
    "accumulation": f"{_MT_CONFIG}: solver.gradient_accumulation_steps: {{value}} (its step counter counts "
    "micro-batches: {value} times the steps for as many updates)",
    "frames": f"{_MT_CONFIG}: data.n_sample_frames: {{value}}",
    "resolution": f"{_MT_CONFIG}: data.image_size: {{value}}",
    "checkpointing": f"{_MT_CONFIG}: solver.gradient_checkpointing: {{value}}",
    "recompute vae.decoder": f"{_MT_MODELS}: vae.enable_gradient_checkpointing() and vae.train() (diffusers 0.30 needs "
    "both)",
    "recompute unet.mid_block": "diffusers' UNetMidBlock2DCrossAttn leaves its first resnet alone; wrap its forward in "
    "torch.utils.checkpoint.checkpoint",
    "recompute vgg": f"{_MT_MODELS}: torch.utils.checkpoint.checkpoint around the call of vgg_IN",
    "recompute syncnet": f"{_MT_MODELS}: torch.utils.checkpoint.checkpoint around the call of syncnet",
    "optimizer": {
        "fused": f"{_MT_MODELS}: optimizer_cls(..., fused=True)",
        "foreach": f"{_MT_MODELS}: optimizer_cls(..., foreach=True)",
    },
    "precision": f"{_MT_LAUNCH}: mixed_precision: {{value}} (fp32 is no; the nets outside of the U-Net stay fp32)",
    "engine": {
        "single": "accelerate launch without --config_file",
        "ddp": f"{_MT_LAUNCH}: distributed_type: MULTI_GPU",
        "zero1": f"{_MT_LAUNCH}: deepspeed_config.zero_stage: 1",
        "zero2": f"{_MT_LAUNCH}: deepspeed_config.zero_stage: 2",
        "zero3": f"{_MT_LAUNCH}: deepspeed_config.zero_stage: 3",
    },
    "devices": f"{_MT_LAUNCH}: num_processes: {{value}}",
    "offload_optimizer": f"{_MT_LAUNCH}: deepspeed_config.offload_optimizer_device: cpu",
    "vgg_weight": f"{_MT_CONFIG}: loss_params.vgg_loss: {{value}}",
    "gan_weight": f"{_MT_CONFIG}: loss_params.gan_loss: {{value}}",
    "mouth_gan_weight": f"{_MT_CONFIG}: loss_params.mouth_gan_loss: {{value}}",
    "sync_weight": f"{_MT_CONFIG}: loss_params.sync_loss: {{value}}",
    "expandable_allocator": _ALLOCATOR,
}


def f5_tts(config: str) -> Upstream:
    """Of F5-TTS and E2 TTS, whose model is chosen by the name of a configuration file."""
    file = f"src/f5_tts/configs/{config}.yaml"
    return {
        "micro_batch": f"{file}: datasets.batch_size_per_gpu: {{value}}, with batch_size_type: frame",
        "accumulation": f"{file}: optim.grad_accumulation_steps: {{value}}",
        "checkpointing": f"{file}: model.arch.checkpoint_activations: {{value}} (no flag of finetune_cli.py sets it)",
        "precision": {
            "fp32": "accelerate launch --mixed_precision no",
            "fp16": "accelerate launch --mixed_precision fp16",
            "bf16": "accelerate launch --mixed_precision bf16",
        },
        "optimizer": {
            "8bit": f"{file}: optim.bnb_optimizer: True",
            "fused": f"{file}: optim.bnb_optimizer: False",
            "foreach": "src/f5_tts/model/trainer.py: AdamW(model.parameters(), lr=learning_rate, foreach=True)",
        },
        "clip": f"{file}: optim.max_grad_norm: {{value}}",
        "ema": "src/f5_tts/model/trainer.py: EMA(model, include_online_model=False) on the main process",
        "devices": "accelerate launch --num_processes {value}",
        "expandable_allocator": _ALLOCATOR,
    }


_S1_CONFIG = "GPT_SoVITS/configs/s1longer-v2.yaml"

GPT_SOVITS_S1: Upstream = {
    "micro_batch": f"{_S1_CONFIG}: train.batch_size: {{value}}",
    "accumulation": "GPT_SoVITS/AR/models/t2s_lightning_module.py, training_step: `if (batch_idx + 1) % {value} == 0` "
    "instead of `if batch_idx > 0 and batch_idx % 4 == 0`",
    "precision": {
        "fp16": f"{_S1_CONFIG}: train.precision: 16-mixed",
        "bf16": f"{_S1_CONFIG}: train.precision: bf16-mixed",
        "fp32": f"{_S1_CONFIG}: train.precision: 32",
    },
    "clip_seconds": f"{_S1_CONFIG}: data.max_sec: {{value}}",
    "checkpointing": "GPT_SoVITS/AR/modules/transformer.py, TransformerEncoder.forward: "
    "output = torch.utils.checkpoint.checkpoint(mod, output, use_reentrant=False) for each layer",
    "wrapper": {"none": "GPT_SoVITS/s1_train.py: Trainer(strategy='auto') for one card"},
    "accuracy": {"none": "GPT_SoVITS/AR/models/t2s_model.py: no self.ar_accuracy_metric(...) in forward"},
    "devices": "GPT_SoVITS/s1_train.py: Trainer(devices={value}, use_distributed_sampler=False)",
    "expandable_allocator": _ALLOCATOR,
}

_S2_CONFIG = "GPT_SoVITS/configs/s2.json"

GPT_SOVITS_S2: Upstream = {
    "micro_batch": f"{_S2_CONFIG}: train.batch_size: {{value}}",
    "accumulation": "GPT_SoVITS/s2_train.py: it has none; step optim_d and optim_g on every batch number {value}, with "
    "the losses / {value}",
    "precision": {
        "fp16": f"{_S2_CONFIG}: train.fp16_run: true",
        "fp32": f"{_S2_CONFIG}: train.fp16_run: false",
        "bf16": "GPT_SoVITS/s2_train.py: autocast(dtype=torch.bfloat16), GradScaler(enabled=False)",
    },
    "checkpointing": "GPT_SoVITS/module/models.py: torch.utils.checkpoint.checkpoint around each of the encoder's "
    "layers, the flow's and the generator's resblocks",
    "clip_seconds": "GPT_SoVITS/s2_train.py: boundaries of DistributedBucketSampler that end at {value} s x 50 frames",
    "segment_frames": f"{_S2_CONFIG}: train.segment_size: {{value}} x 640",
    "zero_grad": "GPT_SoVITS/s2_train.py: optim_d.zero_grad() and optim_g.zero_grad() right after their steps",
    "wrapper": {"none": "GPT_SoVITS/s2_train.py: no DDP(net_g, ...) and DDP(net_d, ...) for one card"},
    "devices": f"{_S2_CONFIG}: train.gpu_numbers: {{value}} of them, as 0-1",
    "expandable_allocator": _ALLOCATOR,
}

GPT_SOVITS_S2_V3: Upstream = {
    **{key: GPT_SOVITS_S2[key] for key in ("micro_batch", "precision", "zero_grad", "devices", "expandable_allocator")},
    "wrapper": {"none": "GPT_SoVITS/s2_train_v3.py: no DDP(net_g, ...) for one card"},
    "accumulation": "GPT_SoVITS/s2_train_v3.py: it has none; step optim_g on every batch number {value}, with the loss "
    "/ {value}",
    "checkpointing": f"{_S2_CONFIG}: train.grad_ckpt: {{value}} (every block of the DiT)",
    "lora": f"GPT_SoVITS/s2_train_v3_lora.py instead of s2_train_v3.py; {_S2_CONFIG}: train.lora_rank: {{value}}",
    "clip_seconds": "GPT_SoVITS/s2_train_v3.py: boundaries of DistributedBucketSampler ending at {value} s x 50 frames",
}
