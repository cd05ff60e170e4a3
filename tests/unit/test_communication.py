"""Times of collectives, computed by hand from links of round figures, and their limits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import DEVICE, RATES

from torchtitan_lite.config import ParallelDegrees
from torchtitan_lite.planner.communication import Network, Ring, rings_of

GB = 10**9
NETWORK = Network(DEVICE, RATES)  # links of 400 GB/s in a node of 8, network adapters of 45 GB/s
RACK = Network(replace(DEVICE, node_devices=72), RATES)
FASTER = Network(replace(DEVICE, network_gb_s=100), RATES)

# ----- gather_s, all_reduce_s, crosses_nodes -----


@pytest.mark.parametrize(
    ("network", "ring", "latency_us", "gb_per_s", "crosses"),
    [
        (NETWORK, Ring(2, 1), 7 + 2, 400, False),
        (NETWORK, Ring(8, 1), 7 + 7 * 2, 400, False),
        (NETWORK, Ring(4, 2), 7 + 3 * 2, 400, False),  # all of them still in one node
        # Over 8 network adapters, slower than the links; faster ones would wait for these.
        (NETWORK, Ring(16, 1), 7 + 14 * 2 + 5, 360, True),
        (FASTER, Ring(16, 1), 7 + 14 * 2 + 5, 400, True),
        (NETWORK, Ring(64, 1), 7 + 56 * 2 + 7 * 5, 360, True),
        (NETWORK, Ring(8, 2), 7 + 6 * 2 + 5, 180, True),  # 4 members in each of two nodes
        (NETWORK, Ring(2, 8), 7 + 5, 45, True),  # one member in each node
        (NETWORK, Ring(4, 64), 7 + 3 * 5, 45, True),
        (NETWORK, Ring(9, 1), 7 + 7 * 2 + 5, 360, True),  # the second node is nearly empty
        (RACK, Ring(72, 1), 7 + 71 * 2, 400, False),  # a rack is one node
    ],
)
def test_gather_s_has_its_latencies_and_the_slowest_link(
    network, ring, latency_us, gb_per_s, crosses
):
    sent = (ring.size - 1) / ring.size / gb_per_s
    seconds = network.gather_s(GB, ring)
    assert seconds == pytest.approx(1e-6 * latency_us + sent, rel=1e-12)
    assert network.all_reduce_s(GB, ring) == 2 * seconds
    assert network.crosses_nodes(ring) == crosses


def test_gather_s_of_a_rank_alone_or_of_nothing_is_0():
    for stride in (1, 64):
        assert NETWORK.gather_s(GB, Ring(1, stride)) == NETWORK.gather_s(0, Ring(8, stride)) == 0
        assert not NETWORK.crosses_nodes(Ring(1, stride))


@given(
    nbytes=st.floats(1, 1e12),
    ring=st.builds(Ring, st.integers(2, 1024), st.sampled_from([1, 2, 4, 8, 16, 512])),
    more=st.integers(1, 64),
)
def test_gather_s_never_falls_with_ranks_or_bytes(nbytes, ring, more):
    seconds = NETWORK.gather_s(nbytes, ring)
    assert NETWORK.gather_s(nbytes, replace(ring, size=ring.size + more)) >= seconds
    assert NETWORK.gather_s(nbytes * (1 + more), ring) > seconds


# ----- rings_of -----
def test_rings_of_a_mesh_from_tensor_parallelism_to_the_pipeline():
    degrees = ParallelDegrees(dp_replicate=2, dp_shard=3, cp=8, tp=4, pp=5)
    assert rings_of(degrees) == {
        "tensor parallelism": Ring(4, 1),
        "context parallelism": Ring(8, 4),
        "sharding": Ring(24, 4),  # over the ranks of context parallelism too
        "replicas": Ring(2, 96),
        "pipeline": Ring(5, 192),
    }
