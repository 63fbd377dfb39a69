"""python -m pytest tests/jobs/test_counts_visual.py"""

import pytest
import torch

from memfit.job import is_trained
from memfit.jobs import latentsync, musetalk

UNETS = [
    (latentsync.LatentSyncStage1, 849_962_244, 849_962_244, 686),
    (latentsync.LatentSyncStage1At512, 849_962_244, 849_962_244, 686),
    (latentsync.LatentSyncStage2, 1_267_099_844, 674_792_320, 936),
    (latentsync.LatentSyncStage2At512, 1_267_099_844, 674_792_320, 936),
    (latentsync.LatentSyncStage2Efficient, 1_100_244_804, 284_660_480, 392),
    (musetalk.MuseTalkStage1, 849_947_844, 849_947_844, 686),
    (musetalk.MuseTalkStage2, 849_947_844, 849_947_844, 686),
]

OTHERS = [
    (latentsync.LatentSyncStage2, "vae", 83_653_863),
    (latentsync.LatentSyncStage2, "whisper", 37_184_640),
    (latentsync.LatentSyncStage2, "syncnet", 401_306_080),
    (latentsync.LatentSyncStage2, "lpips", 14_716_160),
    (latentsync.LatentSyncStage2, "trepa", 1_011_855_918),
    (latentsync.LatentSyncStage1, "detector", 22_459_110),
    (latentsync.LatentSyncStage1, "evaluator", 13_631_616),
    (musetalk.MuseTalkStage2, "vae", 83_653_863),
    (musetalk.MuseTalkStage2, "whisper", 37_760_640),
    (musetalk.MuseTalkStage2, "syncnet", 371_766_496),
    (musetalk.MuseTalkStage2, "discriminator", 2_758_849),
    (musetalk.MuseTalkStage2, "mouth_discriminator", 2_758_849),
    (musetalk.MuseTalkStage2, "vgg", 12_944_966),
]


@pytest.fixture(scope="module")
def nets_of():
    made = {}

    def nets_of(kind):
        if kind not in made:
            with torch.device("meta"):
                made[kind] = kind().nets()
        return made[kind]

    return nets_of


@pytest.mark.parametrize(("kind", "total", "trained", "tensors"), UNETS)
def test_unets(nets_of, kind, total, trained, tensors):
    nets = nets_of(kind)
    assert sum(p.numel() for p in nets["unet"].parameters()) == total
    learning = [p for p in nets["unet"].parameters() if p.requires_grad]
    assert (sum(p.numel() for p in learning), len(learning)) == (trained, tensors)


@pytest.mark.parametrize(("kind", "net", "parameters"), OTHERS)
def test_other_nets(nets_of, kind, net, parameters):
    assert sum(p.numel() for p in nets_of(kind)[net].parameters()) == parameters


def test_the_vaes_decoder(nets_of):
    assert sum(p.numel() for p in nets_of(latentsync.LatentSyncStage1)["vae"].decoder.parameters()) == 49_490_179


def test_what_is_not_trained_is_frozen_and_in_evaluation_mode(nets_of):
    learning = {"unet", "discriminator", "mouth_discriminator"}
    for kind in (latentsync.LatentSyncStage2, musetalk.MuseTalkStage2):
        nets = nets_of(kind)
        assert {name for name, net in nets.items() if is_trained(net)} == learning & set(nets)
        assert not any(module.training for name in set(nets) - learning for module in nets[name].modules())


def test_precision_of_the_frozen_nets(nets_of):
    kinds = {name: {p.dtype for p in net.parameters()} for name, net in nets_of(latentsync.LatentSyncStage2).items()}
    half, full = {torch.float16}, {torch.float32}
    assert {name for name, dtypes in kinds.items() if dtypes == half} == {"vae", "syncnet", "trepa"}
    rest = {"unet", "whisper", "lpips", "detector", "evaluator"}
    assert {name for name, dtypes in kinds.items() if dtypes == full} == rest


def test_weight_0_loads_no_net(nets_of):
    assert "trepa" not in nets_of(latentsync.LatentSyncStage2Efficient)
    assert not {"syncnet", "lpips", "trepa"} & set(nets_of(latentsync.LatentSyncStage1))
    assert not {"syncnet", "discriminator", "mouth_discriminator"} & set(nets_of(musetalk.MuseTalkStage1))
