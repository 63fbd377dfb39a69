"""The same language model with LoRA: its weights frozen, small matrices beside them trained (peft).

memfit predict examples/lora.py:Lora --device rtx4090 --micro-batch 16384 --set rank=16

For a model of your own, nets() begins with AutoModelForCausalLM.from_pretrained(...).
"""

from language_model import LanguageModel
from peft import LoraConfig, get_peft_model


class Lora(LanguageModel):
    rank: int = 8

    def nets(self):
        config = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules=["q_proj", "v_proj"])
        return {"llama": get_peft_model(super().nets()["llama"], config)}
