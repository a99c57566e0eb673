"""How parameters are split over a mesh with one axis, "tensor". Knows names of parameters only through a family's rule."""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from jaxkv.models.config import ModelConfig
from jaxkv.models.errors import ModelError

AXIS = "tensor"


def by_rule(split: Mapping[str, int], path: str, shape: tuple[int, ...], num_shards: int) -> PartitionSpec:
    """The spec of a parameter: split on the axis its name's ending is listed with, where that divides, else replicated.

    Heads and feed-forward always divide (`check_mesh`); a vocabulary may not.
    """
    axis = next((axis for ending, axis in split.items() if path == ending or path.endswith("." + ending)), None)
    if axis is None or num_shards == 1 or shape[axis] % num_shards:
        return PartitionSpec()
    return PartitionSpec(*(AXIS if i == axis else None for i in range(len(shape))))


def allowed_meshes(config: ModelConfig) -> list[int]:
    """The device counts this model can be split over."""
    dims = (config.num_heads, config.num_kv_heads, config.ffn_dim)
    return [n for n in range(1, config.num_kv_heads + 1) if all(dim % n == 0 for dim in dims)]


def check_mesh(config: ModelConfig, num_shards: int) -> None:
    """Refuse a mesh that does not divide the heads or the feed-forward dim, naming what would."""
    allowed = allowed_meshes(config)
    if num_shards not in allowed:
        raise ModelError(
            f"mesh.tensor = {num_shards} must divide this model's {config.num_heads} query heads, {config.num_kv_heads} kv heads and "
            f"feed-forward dim {config.ffn_dim}; allowed: {', '.join(map(str, allowed))}"
        )
