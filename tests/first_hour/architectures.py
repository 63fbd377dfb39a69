"""Jobs over the architectures of the installed transformers: tiny configurations, made from the default ones by name.

The job is the template that a new user writes. It names no architecture: ``kind`` is the head of an auto class, and the
batch follows from the names of the forward's inputs.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

import memfit

KINDS = {
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "classifier": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "decoder": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_CTC_MAPPING_NAMES",
    "sound": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "speech to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "image and text": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image to text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
WIDTH, HEADS, LAYERS, WORDS, IMAGE = 64, 4, 3, 512, 32

SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "projection_dim", "emb_dim",
         "word_embed_proj_dim", "projection_hidden_size", "hidden_dim", "decoder_hidden_size", "output_dim",
         "classifier_proj_size", "encoder_hidden_size", "text_embed_dim", "vision_hidden_size", "out_hidden_size"),
        WIDTH,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads", "attention_heads", "decoder_num_attention_heads", "num_attention_head"),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "encoder_num_key_value_heads",
                     "decoder_num_key_value_heads"), HEADS),
    **dict.fromkeys(
        ("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim", "attention_head_size"),
        WIDTH // HEADS,
    ),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_inner",
         "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size", "decoder_intermediate_size"),
        2 * WIDTH,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth",
         "num_decoder_layers", "num_encoder_layers", "decoder_num_hidden_layers", "decoder_num_layers",
         "encoder_num_hidden_layers"),
        LAYERS,
    ),
    "vocab_size": WORDS, "image_size": IMAGE, "patch_size": 8, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "moe_num_experts": 4, "num_labels": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "n_group": 1, "topk_group": 1, "max_source_positions": 400,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "conv_channels": WIDTH,
}  # fmt: skip
LISTS: dict[str, Any] = {
    "conv_dim": lambda old: (16,) * len(old), "depths": lambda old: [1] * len(old),
    "hidden_sizes": lambda old: [16 * 2**min(i, 2) for i in range(len(old))],
    "embed_dims": lambda old: [16 * 2**min(i, 2) for i in range(len(old))],
    "num_heads": lambda old: [2] * len(old), "num_attention_heads": lambda old: [2] * len(old),
}  # fmt: skip


def tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with small numbers in the places of the large ones, in its parts too."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            tiny(value)
        elif isinstance(value, list | tuple) and name in LISTS and value:
            setattr(config, name, LISTS[name](value))
        elif isinstance(value, int) and not isinstance(value, bool):
            if name.endswith("_token_id") and value >= WORDS:
                setattr(config, name, 3 + sum(map(ord, name)) % 60)
            elif name in SIZES and value > SIZES[name]:
                setattr(config, name, SIZES[name])
    if isinstance(kinds := getattr(config, "layer_types", None), list):
        config.layer_types = (kinds[:1] + kinds[-2:])[:LAYERS] if len(kinds) > LAYERS else kinds
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    return config


def architectures(kind: str) -> Iterator[tuple[str, str]]:
    """(model type, class) of an auto class's architectures."""
    for model_type, name in getattr(modeling_auto, KINDS[kind]).items():
        yield model_type, name[0] if isinstance(name, tuple | list) else name


@functools.cache
def configuration(model_type: str) -> PreTrainedConfig:
    """The tiny configuration of a model type."""
    return tiny(configuration_auto.CONFIG_MAPPING[model_type]())


class Architecture(memfit.Job):
    """Any of them."""

    model_type: str = "t5"
    class_name: str = "T5ForConditionalGeneration"
    words: int = 40

    def nets(self):
        return {"net": getattr(transformers, self.class_name)(configuration(self.model_type))}

    def optimizers(self, nets):
        return {"adamw": torch.optim.AdamW(nets["net"].parameters(), lr=1e-4)}

    def batch(self, shape):
        return self.collate([self.sample() for _ in range(shape.items)])

    def sample(self):
        config = configuration(self.model_type)
        inputs = set(inspect.signature(getattr(transformers, self.class_name).forward).parameters)
        sample: dict[str, Any] = {}
        if "input_ids" in inputs:
            sample["input_ids"] = sample["labels"] = torch.randint(100, WORDS - 1, (self.words,))
            if "attention_mask" in inputs:
                sample["attention_mask"] = torch.ones(self.words, dtype=torch.long)
        if "pixel_values" in inputs:
            vision = getattr(config, "vision_config", config)
            size = getattr(vision, "image_size", IMAGE) or IMAGE
            size = size if isinstance(size, int) else size[0]
            sample["pixel_values"] = torch.randn(getattr(vision, "num_channels", 3), size, size)
            sample.setdefault("labels", torch.tensor(1))
        if "input_values" in inputs:
            sample["input_values"] = torch.randn(4000)
        if "input_features" in inputs:
            bins = getattr(config, "num_mel_bins", 80) or 80
            long = 2 * getattr(config, "max_source_positions", 200)
            sample["input_features"] = torch.randn(
                *(
                    (long, bins)
                    if "Wav2Vec2Bert" in self.class_name or "Speech2Text" in self.class_name
                    else (bins, long)
                )
            )
        if "decoder_input_ids" in inputs and "input_ids" not in inputs:
            sample["labels"] = torch.randint(100, WORDS - 1, (self.words,))
        sample.setdefault("labels", torch.randint(1, 30, (6,)))
        if "Classification" in self.class_name:
            sample["labels"] = torch.tensor(1)
        if "return_loss" in inputs:
            del sample["labels"]
        return sample

    def loss(self, nets, batch):
        more = {} if "labels" in batch else {"return_loss": True}
        count = len(next(iter(batch.values())))
        return nets["net"](**batch, **more).loss * count, count

    def dataset(self):
        return [self.sample() for _ in range(16)]


class HalfArchitecture(Architecture):
    """Any of them under bf16 autocast."""

    precision = "bf16"
