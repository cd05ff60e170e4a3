"""Times of collectives, computed by hand from the links of round figures, and their limits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import DEVICE, RATES

from torchtitan_lite.config import ParallelDegrees
from torchtitan_lite.planner.communication import Network, Ring, rings_of

GB = 10**9
NETWORK = Network(DEVICE, RATES)  # links of 400 GB/s in a node of 8, network adapters of 45 GB/s
RINGS = st.builds(Ring, st.integers(2, 1024), st.sampled_from([1, 2, 4, 8, 16, 512]))
SIZES = st.floats(1, 1e12)


@pytest.mark.parametrize(
    ("ring", "latency_us", "bytes_per_s"),
    [
        (Ring(2, 1), 7 + 2, 400e9),
        (Ring(8, 1), 7 + 7 * 2, 400e9),
        (Ring(4, 2), 7 + 3 * 2, 400e9),  # all of them still in one node
        (Ring(16, 1), 7 + 14 * 2 + 5, 360e9),  # over 8 network adapters, slower than the links
        (Ring(64, 1), 7 + 56 * 2 + 7 * 5, 360e9),
        (Ring(8, 2), 7 + 6 * 2 + 5, 180e9),  # 4 members in each of two nodes
        (Ring(2, 8), 7 + 5, 45e9),  # one member in each node
        (Ring(16, 8), 7 + 15 * 5, 45e9),
        (Ring(4, 64), 7 + 3 * 5, 45e9),
        (Ring(12, 1), 7 + 10 * 2 + 5, 360e9),  # the second node is half empty
    ],
)
def test_a_gather_takes_its_latencies_and_the_slowest_link(
    ring: Ring, latency_us: float, bytes_per_s: float
) -> None:
    sent = GB * (ring.size - 1) / ring.size
    seconds = NETWORK.gather_s(GB, ring)
    assert seconds == pytest.approx(1e-6 * latency_us + sent / bytes_per_s, rel=1e-12)


def test_eight_network_adapters_are_no_faster_than_the_links_before_them() -> None:
    fast = Network(replace(DEVICE, network_gb_s=100), RATES)
    no_latency = 7e-6 + 14 * 2e-6 + 5e-6
    assert fast.gather_s(GB, Ring(16, 1)) - no_latency == pytest.approx(15 / 16 / 400)


def test_a_rack_of_72_is_one_node() -> None:
    rack = Network(replace(DEVICE, node_devices=72), RATES)
    assert rack.gather_s(GB, Ring(72, 1)) == pytest.approx(7e-6 + 71 * 2e-6 + 71 / 72 / 400)
    assert not rack.crosses_nodes(Ring(72, 1))
    assert rack.crosses_nodes(Ring(73, 1)) and NETWORK.crosses_nodes(Ring(72, 1))


@pytest.mark.parametrize(
    ("ring", "crosses"),
    [
        (Ring(1, 64), False),
        (Ring(8, 1), False),
        (Ring(4, 2), False),
        (Ring(9, 1), True),
        (Ring(5, 2), True),
        (Ring(2, 8), True),
    ],
)
def test_which_rings_cross_nodes(ring: Ring, crosses: bool) -> None:
    assert NETWORK.crosses_nodes(ring) == crosses


@given(nbytes=SIZES, stride=st.integers(1, 64))
def test_a_rank_alone_and_a_gather_of_nothing_take_no_time(nbytes: float, stride: int) -> None:
    assert NETWORK.gather_s(nbytes, Ring(1, stride)) == NETWORK.gather_s(0, Ring(8, stride)) == 0
    assert NETWORK.all_reduce_s(nbytes, Ring(1, stride)) == 0


@given(nbytes=SIZES, ring=RINGS, more=st.integers(1, 64))
def test_more_ranks_and_more_bytes_are_never_faster(nbytes: float, ring: Ring, more: int) -> None:
    seconds = NETWORK.gather_s(nbytes, ring)
    assert NETWORK.gather_s(nbytes, replace(ring, size=ring.size + more)) >= seconds
    assert NETWORK.gather_s(nbytes * (1 + more), ring) > seconds


@given(nbytes=SIZES, ring=RINGS)
def test_an_all_reduce_takes_two_gathers(nbytes: float, ring: Ring) -> None:
    assert NETWORK.all_reduce_s(nbytes, ring) == 2 * NETWORK.gather_s(nbytes, ring) > 0


def test_the_mesh_has_tensor_parallelism_innermost_and_replicas_outermost() -> None:
    degrees = ParallelDegrees(dp_replicate=2, dp_shard=16, cp=1, tp=4)
    rings = rings_of(degrees)
    found = rings["tensor parallelism"], rings["sharding"], rings["replicas"]
    assert found == (Ring(4, 1), Ring(16, 4), Ring(2, 64))


def test_ranks_that_share_sequences_shard_weights_too() -> None:
    degrees = ParallelDegrees(dp_replicate=2, dp_shard=3, cp=8, tp=4)
    assert rings_of(degrees) == {
        "tensor parallelism": Ring(4, 1),
        "context parallelism": Ring(8, 4),
        "sharding": Ring(24, 4),
        "replicas": Ring(2, 96),
        "pipeline": Ring(1, 192),
    }
