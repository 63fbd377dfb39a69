"""pytest tests/device/test_cluster.py: which link joins which ranks of a mesh on several nodes."""

import pytest

from memfit.device.hardware.catalogue import catalogue, find_device, interconnects, networks
from memfit.device.hardware.cluster import cluster_of
from memfit.errors import InputError
from memfit.mesh import parse_mesh

H100 = find_device("h100")
CLUSTER = cluster_of(H100, 64, 8)
NVLINK, NETWORK = 450e9, 50e9


@pytest.mark.parametrize(
    ("mesh", "dimension", "ranks", "nodes", "rate"),
    [
        ("dp_replicate=8,dp_shard=8", "dp_shard", 8, 1, NVLINK),
        ("dp_replicate=8,dp_shard=8", "dp_replicate", 8, 8, NETWORK),
        ("dp_shard=64", "dp_shard", 64, 8, 8 * NETWORK),
        ("dp_replicate=2,dp_shard=32", "dp_shard", 32, 4, 8 * NETWORK),
        ("dp_shard=8,tp=8", "tp", 8, 1, NVLINK),
        ("dp_shard=8,tp=8", "dp_shard", 8, 8, NETWORK),
        ("dp_shard=32,tp=2", "dp_shard", 32, 8, 4 * NETWORK),
        ("dp_shard=4,tp=16", "tp", 16, 2, 8 * NETWORK),
    ],
)
def test_a_ring_takes_the_slowest_of_its_links_and_its_share_of_the_adapters(mesh, dimension, ranks, nodes, rate):
    shape = parse_mesh(mesh)
    joined = CLUSTER.joins(shape, dimension)
    assert (joined.ranks, joined.nodes, joined.bytes) == (ranks, nodes, rate)
    assert CLUSTER.crosses(shape, dimension) == (nodes > 1)


def test_steps_from_node_to_node_take_longer_than_those_inside():
    inside, between = (
        CLUSTER.joins(parse_mesh("dp_replicate=8,dp_shard=8"), name) for name in ("dp_shard", "dp_replicate")
    )
    assert inside.ring_seconds == pytest.approx(7 * 3.4e-6)
    assert between.ring_seconds == pytest.approx(7 * 14e-6)
    assert CLUSTER.joins_all().ring_seconds == pytest.approx(56 * 3.4e-6 + 7 * 14e-6)


def test_adapters_that_are_given_are_divided_between_the_cards_of_a_node():
    one, four = (cluster_of(H100, 16, 2, network) for network in ("ethernet-100g", "4 x Ethernet-100G"))
    assert one.network.bytes == 12.5e9 / 8
    assert four.network.bytes == 4 * 12.5e9 / 8
    assert "1.5625 GB/s a card between the 2 nodes" in one.words()
    assert "between the 8 cards of a node" in cluster_of(H100, 8, 1).words()


@pytest.mark.parametrize(
    ("card", "devices", "nodes", "network", "words"),
    [
        ("h100", 10, 4, None, "10 devices do not divide over 4 nodes; write --nodes 2"),
        ("l40s", 16, 2, None, "what joins nodes of l40s is not known; write --network"),
        ("h100", 16, 2, "ethernet-100", "write ethernet-100g"),
        ("h100", 16, 2, "nvlink4", "not one of ethernet-10g"),
        ("h100", 16, 2, "0xethernet-100g", "a node has an adapter at least"),
        ("h100", 8, 1, "ethernet-100g", "there is one node"),
        ("cpu", 8, 2, None, "links between nodes are known of cards alone"),
    ],
)
def test_what_is_not_known_is_asked_for(card, devices, nodes, network, words):
    with pytest.raises(InputError) as error:
        cluster_of(find_device(card), devices, nodes, network)
    assert words in str(error.value)


def test_every_network_of_a_card_is_in_the_catalogue_with_its_source():
    known = [card for card in catalogue().values() if card.network is not None]
    assert {card.key for card in known} == {"a100-40gb", "a100-80gb", "h100", "h200", "b200"}
    for card in known:
        assert card.network in {each.name for each in networks().values()}
        assert card.network_bytes
        assert card.sources["network_bytes"]
    assert all(each.step_seconds == 14e-6 for each in networks().values())
    assert not any(each.between_nodes for key, each in interconnects().items() if "link" in key or "pcie" in key)
