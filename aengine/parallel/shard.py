"""`Shard`: which part of a model a rank holds. Knows nothing of models or processes."""

from __future__ import annotations

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Ranks are numbered stage by stage: rank = stage * size + index. The first rank is the driver's."""

    index: int = 0  # in its tensor-parallel group
    size: int = 1  # ranks that share every layer of a stage
    stage: int = 0
    num_stages: int = 1
    exact: bool = True
    """Whether every dot product is computed whole on one rank, so that results are those of one rank, bit by bit. Otherwise products
    whose inputs are split are summed over the ranks, in their order."""
    group: int = 1  # quantised columns that share a scale; what is summed over the ranks is split in multiples of it
    splits_embedding: bool = False  # by the vocabulary; else it is whole on each rank of the first stage
    replica: int = 0  # among the engines that share experts
    num_replicas: int = 1

    @classmethod
    def of(cls, config: EngineConfig, rank: int) -> Shard:
        stage, index = divmod(rank, config.tensor_parallel_size)
        exact = config.tensor_parallel_mode == "exact"
        size, stages, replicas = config.tensor_parallel_size, config.pipeline_parallel_size, config.expert_parallel_size
        return cls(index, size, stage, stages, exact, replica=config.expert_parallel_rank, num_replicas=replicas)

    @property
    def rank(self) -> int:
        return self.stage * self.size + self.index

    @property
    def num_ranks(self) -> int:
        return self.size * self.num_stages

    @property
    def is_last_stage(self) -> bool:
        return self.stage + 1 == self.num_stages

    def bounds(self, total: int, unit: int = 1) -> tuple[int, ...]:
        """[size + 1]: where the parts begin that the ranks of a stage have of `total` rows or columns, and the end. Parts are multiples of
        `unit`, but for the last that is not empty, and differ by at most one unit."""
        units, left = divmod(-(-total // unit), self.size)
        return tuple(min(unit * (units * i + min(i, left)), total) for i in range(self.size + 1))

    def part(self, total: int, unit: int = 1) -> range:
        """The part of `total` rows or columns that this rank holds, one of those that `bounds` gives."""
        return range(*self.bounds(total, unit)[self.index : self.index + 2])

    def experts(self, count: int) -> range:
        """The experts of a layer of `count` that this replica holds."""
        return range(count * self.replica // self.num_replicas, count * (self.replica + 1) // self.num_replicas)

    def layers(self, count: int) -> range:
        """The layers of this rank's stage."""
        return range(count * self.stage // self.num_stages, count * (self.stage + 1) // self.num_stages)


WHOLE = Shard()
"""Of a model on one rank."""
