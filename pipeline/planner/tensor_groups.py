"""How a tensor group is written down, and how its modules are named."""

from schemas.plan import Shard, TensorGroup


def group(
    names: tuple[str, ...],
    params: int,
    shard: Shard,
    *,
    layers: int = 1,
    quantizable: bool = True,
    fixed: float = 0.0,
) -> TensorGroup:
    """A group of weights that share a shape rule."""
    return TensorGroup(
        names=names,
        params=params,
        shard=shard,
        layers=layers,
        quantizable=quantizable,
        fixed_bytes_per_param=fixed,
    )


def layer_names(*modules: str) -> tuple[str, ...]:
    """Names of modules that stand in every layer."""
    return tuple(f"layers.#.{module}" for module in modules)
