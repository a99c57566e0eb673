"""The sizes of states against published models: from numbers alone, no JAX."""

from typing import Any

from jaxkv.models import ModelConfig, StateShape, state_bytes, state_shapes
from jaxkv.models.config import Recurrent, Rope


def config(num_layers: int, recurrent: Recurrent | None, **changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 256, **changes}
    numbers = {"vocab_size": 320, "hidden_dim": 64, "ffn_dim": 64, "max_position": 64, "norm_eps": 1e-6, "rope": Rope()}
    return ModelConfig(
        model_type="any", num_layers=num_layers, tie_embeddings=True, dtype="bfloat16", recurrent=recurrent, **numbers, **fields
    )


def three_of_four(num_layers: int, num_heads: int) -> Recurrent:
    layers = tuple(layer for layer in range(num_layers) if layer % 4 != 3)
    return Recurrent("delta", layers, num_heads=num_heads, head_dim=128, num_groups=16, state_dim=128, conv_len=4)


def test_states_of_the_gated_delta_rule_take_what_qwen_3_5_and_3_6_take():
    assert state_bytes(config(32, three_of_four(32, 32)), "bfloat16") == 51_511_296
    assert state_bytes(config(40, three_of_four(40, 32)), "bfloat16") == 64_389_120


def test_states_of_mamba_take_what_mamba_130m_takes():
    made = Recurrent("mamba", tuple(range(24)), num_heads=1, head_dim=1536, num_groups=1, state_dim=16, conv_len=4, step_rank=48)
    assert state_bytes(config(24, made, num_heads=0, num_kv_heads=0, head_dim=0), "bfloat16") == 2_580_480


def test_a_state_is_a_window_in_the_models_dtype_and_a_sum_in_float32_split_by_heads():
    made = Recurrent("mamba2", (0, 1), num_heads=8, head_dim=16, num_groups=2, state_dim=12, conv_len=4)
    shapes = state_shapes(config(2, made), "bfloat16")
    assert shapes == ((StateShape((3, 176), "bfloat16", None), StateShape((8, 12, 16), "float32", 0)),) * 2


def test_a_layer_is_counted_among_those_that_keep_the_same():
    mixed = config(8, three_of_four(8, 4))
    assert (mixed.state_layers, mixed.page_layers) == ((0, 1, 2, 4, 5, 6), (3, 7))
    assert [mixed.place_of(layer) for layer in range(8)] == [0, 1, 2, 0, 3, 4, 5, 1]


def test_a_model_without_such_layers_has_no_states():
    plain = config(3, None)
    assert (state_shapes(plain, "float32"), state_bytes(plain, "float32"), plain.page_layers) == ((), 0, (0, 1, 2))


def test_a_config_with_states_comes_back_from_json_as_it_was():
    mixed = config(8, three_of_four(8, 4), rotary_dim=64)
    assert ModelConfig.from_json(mixed.to_json()) == mixed
