"""Experts: the tiles that tokens are put into, the sum against running every expert on every token, and the bits that must not move."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxkv.models import ModelError, check_mesh, inspect_checkpoint
from jaxkv.models.config import Experts
from jaxkv.models.decoder import Decoder
from jaxkv.models.experts import TILE, ExpertMLP, list_tiles
from tests.cpu.checkpoints import FIXTURES, change_tensors, fixture_copy

M, F, E, CHOSEN = 64, 32, 8, 2


def mlp(dtype: str, rescale: bool = True) -> ExpertMLP:
    made = ExpertMLP(M, Experts(E, CHOSEN, F, rescale), jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) / np.sqrt(M), x.dtype), nnx.state(made))
    nnx.update(made, state)
    return made


class Runner:
    """Rows in, rows out, whatever way round the layers like them."""

    def __init__(self, made: ExpertMLP, dtype: str) -> None:
        graph, self.state = nnx.split(made)
        self.dtype, self.run = dtype, jax.jit(lambda state, x: nnx.merge(graph, state)(x))

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        x = jnp.asarray(rows, self.dtype)
        done = np.asarray(self.run(self.state, x.T if self.dtype == "float32" else x))
        return np.ascontiguousarray(done.T if self.dtype == "float32" else done)


def every_expert(made: ExpertMLP, rows: np.ndarray) -> np.ndarray:
    """The slow, obvious way, in float64: all experts on every row, most of them weighted with nothing."""
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
    router, gate, up, down = (np.asarray(p.weight[...], np.float64) for p in (made.router, made.gate, made.up, made.down))
    scores = np.exp(rows @ router.T)
    chances = scores / scores.sum(-1, keepdims=True)
    weights = np.zeros_like(chances)
    for row, best in enumerate(np.argsort(-chances, axis=-1, kind="stable")[:, :CHOSEN]):
        weights[row, best] = chances[row, best] / (chances[row, best].sum() if made.experts.rescale else 1)
    results = np.stack([(silu(rows @ gate[e].T) * (rows @ up[e].T)) @ down[e].T for e in range(E)], axis=1)
    return np.einsum("te,tem->tm", weights, results)


def test_tiles_are_made_expert_by_expert_in_the_order_of_the_tokens() -> None:
    tiles = list_tiles(jnp.array([[0, 2], [2, 1], [0, 2], [2, 0]]), num_experts=4, rows=2)
    assert int(tiles.num_tiles) == 5
    assert tiles.experts[:5].tolist() == [0, 0, 1, 2, 2]
    assert tiles.tokens[:5].tolist() == [[0, 2], [3, 0], [1, 0], [0, 1], [2, 3]]
    assert tiles.places.tolist() == [[0, 6], [7, 4], [1, 8], [9, 2]]


@pytest.mark.parametrize("rows", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["spread", "all the same", "random"])
def test_there_is_room_for_the_tiles_of_any_choice_and_no_token_is_left_out(kind: str, rows: int) -> None:
    t, e = 13, 6
    rng = np.random.default_rng(rows)
    chosen = {
        "spread": np.stack([np.arange(t) % e, (np.arange(t) + 1) % e], 1),
        "all the same": np.tile([4, 1], (t, 1)),
        "random": np.stack([rng.permutation(e)[:2] for _ in range(t)]),
    }[kind]
    tiles = list_tiles(jnp.asarray(chosen, jnp.int32), e, rows)
    used = int(tiles.num_tiles)
    assert used == sum(-(-int((chosen == expert).sum()) // rows) for expert in range(e)) <= len(tiles.experts)
    flat, places = tiles.tokens.reshape(-1), np.asarray(tiles.places)
    assert len(set(places.reshape(-1).tolist())) == t * 2
    for token in range(t):
        for choice in range(2):
            place = int(places[token, choice])
            assert (int(flat[place]), int(tiles.experts[place // rows])) == (token, int(chosen[token, choice]))


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("t", [2, 8, 40])
def test_the_sum_is_that_of_running_every_expert_on_every_token(t: int, rescale: bool) -> None:
    made = mlp("float32", rescale)
    rows = np.random.default_rng(t).standard_normal((t, M)).astype(np.float32)
    np.testing.assert_allclose(Runner(made, "float32")(rows), every_expert(made, rows.astype(np.float64)), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("t", [2, 8, 40])
def test_a_token_keeps_its_bits_wherever_it_is_and_whoever_chooses_its_experts(t: int, dtype: str) -> None:
    """The same row in every place of the batch, so in every place of a tile, among others that are alike, unlike, or not finite."""
    run, rng = Runner(mlp(dtype), dtype), np.random.default_rng(t)
    subject = rng.standard_normal(M).astype(np.float32)
    seen = set()
    for trial in range(12):
        rows = rng.standard_normal((t, M)).astype(np.float32) * (1, 30)[trial % 2]
        if trial % 3 == 0:
            rows[:] = subject * 1.01  # they all go where it goes
        if trial == 7:
            rows[:] = np.inf
        at = int(rng.integers(t))
        rows[at] = subject
        seen.add(run(rows)[at].tobytes())
    assert len(seen) == 1


def test_as_many_products_are_run_as_there_are_tiles() -> None:
    everyone_alike = jnp.tile(jnp.array([[3, 5]]), (16, 1))
    assert int(list_tiles(everyone_alike, 64).num_tiles) == 2 * (16 // TILE)
    all_apart = jnp.arange(32).reshape(16, 2)
    assert int(list_tiles(all_apart, 64).num_tiles) == 32  # where running every expert would be 64


def test_an_expert_that_nobody_chose_is_not_run() -> None:
    """Its weights are no numbers: multiplied with nothing at all, they would still be none."""
    made, rows = mlp("float32"), np.random.default_rng(1).standard_normal((3, M)).astype(np.float32)
    expected = Runner(made, "float32")(rows)
    router = np.asarray(made.router.weight[...])
    chosen = set(np.argsort(-(rows @ router.T), axis=-1)[:, :CHOSEN].reshape(-1).tolist())
    unused = np.array([expert not in chosen for expert in range(E)])
    assert unused.any()
    for product in (made.gate, made.up, made.down):
        product.weight[...] = jnp.where(unused[:, None, None], jnp.nan, product.weight[...])
    assert Runner(made, "float32")(rows).tobytes() == expected.tobytes()


def test_experts_are_split_by_their_feed_forward_dim_and_the_router_is_not() -> None:
    assert Decoder.partition("layers.0.mlp.gate.weight", (8, 16, 64), 2) == PartitionSpec(None, "tensor", None)
    assert Decoder.partition("layers.0.mlp.down.kernel", (8, 16, 64), 2) == PartitionSpec(None, "tensor", None)
    assert Decoder.partition("layers.0.mlp.down.weight", (8, 64, 16), 2) == PartitionSpec(None, None, "tensor")
    assert Decoder.partition("layers.0.mlp.router.weight", (8, 64), 2) == PartitionSpec()


def test_a_mesh_that_does_not_divide_the_experts_is_refused(tmp_path) -> None:
    config = inspect_checkpoint(FIXTURES / "qwen3_moe").config
    check_mesh(config, 2)
    with pytest.raises(ModelError, match=r"feed-forward dim 96 and 16 of its experts, .* kv heads .*; allowed: 1, 2, 4$"):
        check_mesh(config, 3)


def test_the_layers_with_experts_are_those_the_config_names() -> None:
    plain, mixed = (inspect_checkpoint(FIXTURES / name).config for name in ("qwen3_moe", "qwen3_moe_mixed"))
    assert plain.experts == Experts(num_experts=8, num_chosen=2, ffn_dim=16, rescale=True)
    assert mixed.experts == Experts(num_experts=8, num_chosen=2, ffn_dim=16, rescale=False, dense_layers=(0,))
    assert (mixed.experts_of(0), mixed.experts_of(1)) == (None, mixed.experts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": None}, r"num_local_experts must be a positive integer, got nothing"),
        ({"num_experts_per_tok": 9}, r"each token visits 9 of 8 experts"),
        ({"num_hidden_layers": 10**9}, r"1000000000 layers, allowed: at most 10000"),
        ({"use_sliding_window": True}, r"use_sliding_window = True is not supported for 'qwen3_moe', only False"),
    ],
)
def test_a_config_of_experts_that_cannot_be_is_refused(tmp_path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        inspect_checkpoint(fixture_copy("qwen3_moe", tmp_path, **changes))


def test_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path) -> None:
    folder, name = fixture_copy("qwen3_moe", tmp_path), "model.layers.1.mlp.experts.5.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1].copy()}))
    with pytest.raises(ModelError, match=r"experts\.5\.up_proj\.weight' gives \(8, 15, 64\), the config asks for \(8, 16, 64\)"):
        inspect_checkpoint(folder)
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=r"1 missing: model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight$"):
        inspect_checkpoint(folder)


def test_two_devices_give_the_logits_of_one(run_python) -> None:
    folder = FIXTURES / "qwen3_moe"
    source = f"""
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxkv.models import dense_logits, load_checkpoint
loaded = load_checkpoint({str(folder)!r}, dtype="float32", mesh=Mesh(np.array(jax.devices()), ("tensor",)))
assert loaded.model.layers[0].mlp.down.weight[...].addressable_shards[0].data.shape == (8, 64, 8)
expected = np.load({str(folder / "reference.npz")!r})
graphdef, state = nnx.split(loaded.model)
step = jax.jit(lambda state, tokens: dense_logits(nnx.merge(graphdef, state), tokens))
print(np.abs(np.asarray(step(state, jnp.asarray(expected["input_ids_1"]))) - expected["logits_1"]).max())
"""
    assert float(run_python(source, devices=2)) < 2e-4
