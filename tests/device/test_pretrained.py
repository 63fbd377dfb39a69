"""Weights that were really saved, and nets that are traced without reading them."""

import contextlib
import gc
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.device.hardware.benchmarks import AllocatorEvents
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.errors import InputError
from memfit.script.pretrained import absent_weights
from tests.device.minimal_tracer import MinimalTracer

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=64)
    transformers.GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def unet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unet")
    diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def noted_of(net):
    return net.name_or_path, net.config.name_or_path, net.generation_config.to_dict()


@pytest.mark.parametrize("of_script", [False, True])
def test_a_net_of_transformers_knows_where_it_came_from(tmp_path, of_script):
    """Trainers load it again by that name, and ``generate`` takes its lengths from the folder."""
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100, n_positions=64)
    net = transformers.GPT2LMHeadModel(config)
    net.generation_config.max_new_tokens = 7
    net.save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    real = noted_of(load(tmp_path))
    with virtual_gpu(CardRules()), absent_weights(lambda line: None) if of_script else contextlib.nullcontext():
        assert noted_of(load(tmp_path)) == real
    assert real[2]["max_new_tokens"] == 7


def test_a_net_of_diffusers_knows_where_it_came_from(unet):
    with virtual_gpu(CardRules()):
        net = diffusers.UNet2DModel.from_pretrained(unet)
    assert net.config["_name_or_path"] == diffusers.UNet2DModel.from_pretrained(unet).config["_name_or_path"]


@pytest.mark.parametrize("asked", [None, "auto", torch.float16, "float16"])
@pytest.mark.parametrize("inside_device", [True, False])
def test_transformers(language_model, no_gc, asked, inside_device):
    options = {} if asked is None else {"dtype": asked}
    dtype = {None: torch.bfloat16, "auto": torch.bfloat16}.get(asked, torch.float16)
    with virtual_gpu(CardRules()) as gpu, MinimalTracer(gpu) as tracer:
        with torch.device("cuda") if inside_device else contextlib.nullcontext():
            net = transformers.AutoModelForCausalLM.from_pretrained(language_model, **options)
        net = net.to("cuda")
        assert net.lm_head.weight is net.transformer.wte.weight
        assert not net.training
        parameters = {id(p): p for p in net.parameters()}.values()
        assert {(type(p), p.dtype, p.device.type) for p in parameters} == {(FakeTensor, dtype, "cuda")}
        held = sum(p.numel() * p.itemsize for p in parameters)
        buffers = {b.untyped_storage()._cdata: b.numel() * b.itemsize for b in net.buffers()}
        assert tracer.live == held + sum(buffers.values())


@pytest.mark.parametrize("asked", [None, torch.bfloat16])
def test_diffusers(unet, asked):
    options = {} if asked is None else {"torch_dtype": asked}
    with virtual_gpu(CardRules()):
        net = diffusers.UNet2DModel.from_pretrained(unet, **options).to("cuda")
        assert {(type(p), p.dtype) for p in net.parameters()} == {(FakeTensor, asked or torch.float32)}
        x = torch.ones(2, 3, 8, 8, device="cuda", dtype=asked)
        assert net(x, torch.zeros(2, device="cuda")).sample.shape == (2, 3, 8, 8)


def test_real_weights_are_read_afterwards(language_model):
    with virtual_gpu(CardRules()):
        pass
    net = transformers.AutoModelForCausalLM.from_pretrained(language_model)
    assert type(net.lm_head.weight.data) is torch.Tensor
    assert os.path.getsize(language_model / "model.safetensors") > 50_000


IMPORTED_INSIDE = """
import json, sys, time
from memfit.device.virtual.virtual_device import virtual_cpu
slept = []
time.sleep = slept.append
with virtual_cpu():
    from transformers import AutoModel
    net = AutoModel.from_pretrained(sys.argv[1])
    kind = type(net.pooler.dense.weight.data).__name__
    try:
        AutoModel.from_pretrained("nobody/no-such-model")
    except OSError as error:
        said = str(error)
    print(json.dumps({"type": kind, "said": said, "slept": sum(slept)}))
"""


def test_a_library_that_is_imported_inside_and_a_hub_that_does_not_answer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "num_hidden_layers": 1}))
    environment = {key: value for key, value in os.environ.items() if "OFFLINE" not in key and "proxy" not in key}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    ask = [sys.executable, "-c", IMPORTED_INSIDE, str(tmp_path)]
    done = subprocess.run(ask, env=environment, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["type"] == "FakeTensor"
    assert "nobody/no-such-model" in answer["said"] or "connect" in answer["said"]
    assert answer["slept"] < 1


@pytest.mark.parametrize("asked", [{}, {"dtype": torch.float32}, {"torch_dtype": "auto"}])
def test_the_type_is_that_of_a_real_load(language_model, asked):
    really = transformers.AutoModelForCausalLM.from_pretrained(language_model, **asked)
    with virtual_gpu(CardRules()):
        traced = transformers.AutoModelForCausalLM.from_pretrained(language_model, **asked)
    assert [p.dtype for p in traced.parameters()] == [p.dtype for p in really.parameters()]


def test_unknown_quantization_is_refused(language_model):
    config = transformers.TorchAoConfig if hasattr(transformers, "TorchAoConfig") else transformers.HqqConfig
    quantization = config.__new__(config)
    with virtual_gpu(CardRules()), pytest.raises(InputError, match=f"quantizes with {config.__name__}"):
        transformers.GPT2LMHeadModel.from_pretrained(language_model, quantization_config=quantization)


def test_quantization_without_its_library_is_refused(language_model, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "bitsandbytes" else find(name, *more)
    )
    with virtual_gpu(CardRules()), pytest.raises(InputError, match="pip install bitsandbytes"):
        transformers.GPT2LMHeadModel.from_pretrained(language_model, quantization_config={"load_in_4bit": True})


def traced_bytes(net):
    """Bytes of the storages of a net's parameters, and of what they are quantized with."""
    tensors = [t for p in net.parameters() for t in (p, *vars(getattr(p, "quant_state", None) or p).values())]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def really_held(load):
    """Bytes that torch holds for what ``load`` gives, by the profiler: views of a mapped file tell their own part."""
    with AllocatorEvents() as events:
        net = load()
        gc.collect()
        with events.phase("held"):
            next(net.parameters()) + 0
    return events.peaks()["held"].allocated_bytes


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_part_of_a_loaded_net_keeps_the_whole_file_on_a_cpu(tmp_path, dtype, monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the profiler sees one thread
    config = transformers.T5Config(d_model=128, d_kv=16, d_ff=512, num_layers=2, num_heads=4, vocab_size=100)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)

    def load():
        return transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype).encoder

    load()
    measured = really_held(load)
    with virtual_cpu():
        net = load()
        assert traced_bytes(net) == pytest.approx(measured, rel=0.05)
        encoder = sum(p.nbytes for p in net.parameters())
    assert (measured > 2 * encoder) == (dtype is None)  # converted weights are copies


def save_llama(folder):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 100}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}


def test_four_bits_on_a_cpu_keep_the_whole_file(tmp_path):
    pytest.importorskip("bitsandbytes")
    options = {**save_llama(tmp_path), "bnb_4bit_use_double_quant": False}

    def load():
        return transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=options)

    load()
    measured = really_held(load)
    with virtual_cpu():
        assert traced_bytes(load()) == pytest.approx(measured, rel=0.05)
    assert measured > (tmp_path / "model.safetensors").stat().st_size


def test_four_bits(tmp_path):
    pytest.importorskip("bitsandbytes")
    options = save_llama(tmp_path)
    really = transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=options)
    with virtual_gpu(CardRules()):
        traced = transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=options)
        assert {p.device.type for p in traced.parameters()} == {"cuda"}
    assert [(p.dtype, p.shape) for p in traced.parameters()] == [(p.dtype, p.shape) for p in really.parameters()]
