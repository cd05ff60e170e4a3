"""Time of collectives within and between nodes, by NCCL's model of a ring.

A ring of n ranks takes n - 1 steps; in each, every rank sends an nth of the data to the next one.
Its time is the latency of its steps plus the bytes that a rank sends over the bandwidth of its
slowest link. Source of the formula and of the latencies: NCCL, src/graph/tuning.cc.
"""

from dataclasses import dataclass

from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.config import ParallelDegrees

from .constants import Rates

TENSOR, CONTEXT, PIPELINE = "tensor parallelism", "context parallelism", "pipeline"
SHARDING, REPLICAS = "sharding", "replicas"


@dataclass(frozen=True)
class Ring:
    """The ranks of a mesh dimension: `size` of them, the next one `stride` ranks away."""

    size: int
    stride: int


def rings_of(degrees: ParallelDegrees) -> dict[str, Ring]:
    """Return the ring of each kind of collective. Dimensions of the mesh, from the innermost to the
    outermost: tensor, context, sharding, replicas, pipeline. FSDP shards over both ranks of context
    and of sharding."""
    return {
        TENSOR: Ring(degrees.tp, 1),
        CONTEXT: Ring(degrees.cp, degrees.tp),
        SHARDING: Ring(degrees.fsdp, degrees.tp),
        REPLICAS: Ring(degrees.dp_replicate, degrees.tp * degrees.fsdp),
        PIPELINE: Ring(degrees.pp, degrees.world_size // degrees.pp),
    }


@dataclass(frozen=True)
class Network:
    """The links of a machine with many nodes of `device`."""

    device: DeviceSpec
    rates: Rates

    def gather_s(self, nbytes: float, ring: Ring) -> float:
        """Seconds to gather `nbytes` on every rank, or to reduce and scatter as many."""
        if ring.size == 1 or not nbytes:
            return 0.0
        hops = ring.size - 1
        between = -(-ring.size // self._members_of_a_node(ring)) - 1
        rates = self.rates
        latency = (hops - between) * rates.link_hop_seconds + between * rates.network_hop_seconds
        sent = nbytes * hops / ring.size
        return rates.collective_seconds + latency + sent / (1e9 * self.bandwidth_gb_s(ring))

    def send_s(self, nbytes: float, ring: Ring) -> float:
        """Seconds to send `nbytes` to the next rank; a gather by two sends half its bytes."""
        return self.gather_s(2 * nbytes, Ring(2, ring.stride))

    def bandwidth_gb_s(self, ring: Ring) -> float:
        """GB/s (10^9 bytes per second) that each rank of `ring` sends of large messages."""
        link, members = self.device.link_gb_s * self.rates.link, self._members_of_a_node(ring)
        if not self.crosses_nodes(ring):
            return link
        # Members of a node bring one network adapter each.
        network = self.device.network_gb_s * self.rates.network * members
        return network if members == 1 else min(link, network)

    def all_reduce_s(self, nbytes: float, ring: Ring) -> float:
        """Seconds to sum `nbytes` over the ranks: a reduce-scatter and an all-gather."""
        return 2 * self.gather_s(nbytes, ring)

    def crosses_nodes(self, ring: Ring) -> bool:
        """Whether the ranks of `ring` are on several nodes."""
        return ring.size > self._members_of_a_node(ring)

    def _members_of_a_node(self, ring: Ring) -> int:
        return min(ring.size, max(1, self.device.node_devices // ring.stride))
