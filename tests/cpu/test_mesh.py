"""The pool and the weights split over several devices, in processes of their own with forced CPU devices: exact on that mesh."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cpu.checkpoints import LLAMA, change_tensors, fixture_copy, write_json

THREE_HEADS = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 144,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "eos_token_id": 2,
}

COMMON = """
import json
from dataclasses import replace
import jax
import numpy as np
from jaxkv.request import SamplingParams
from tests.cpu import tiny

PATH, DEVICES = {path!r}, {devices}
ENGINE = dict(model__path=PATH, mesh__tensor=DEVICES, pool__tokens=128)
prompts = [tiny.prompt(n) for n in (5, 21, 16, 33)]
common = dict(max_tokens=40, ignore_eos=True, logprobs=2, context_len=48)
params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, context_shift=i % 2 == 1, **common) for i in range(4)]
"""

SPLIT = """
with tiny.engine(**ENGINE) as made:
    layout, parts = made.parts.layout, made.parts
    shapes = {x.addressable_shards[0].data.shape for layer in parts.pool.arrays for x in layer}
    assert shapes == {(33, layout.num_kv_heads // DEVICES, 4, 16)}, shapes
    assert all(len(x.addressable_shards) == DEVICES for layer in parts.pool.arrays for x in layer)
    query = parts.checkpoint.model.layers[0].attn.q.weight[...]
    assert query.addressable_shards[0].data.shape[0] * DEVICES == query.shape[0]
"""

EXACT = """
    alone = [tiny.content(c) for c in tiny.alone(made, prompts, params)]
    assert made.scheduler.counters.num_parks == 0
    assert made.scheduler.counters.num_shifts == 2
    assert [tiny.content(c) for c in tiny.run(made, prompts, params)] == alone
    assert made.scheduler.counters.num_parks > 0
    choices = SamplingParams(n=6, max_tokens=12, temperature=0.9, seed=7, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    together = made.submit_group(prompts[1], choices).result()
    each = [made.submit(prompts[1], replace(choices, n=1), choice=choice).result() for choice in range(6)]
    assert list(map(tiny.content, together)) == list(map(tiny.content, each))
    assert made.scheduler.counters.num_forks == 5
with tiny.engine(**ENGINE, debug__park_every=3, debug__copy_delay_steps=1, transfer__mode="hold") as made:
    assert [tiny.content(c) for c in tiny.run(made, prompts, params)] == alone
    counters = made.scheduler.counters
    assert counters.num_parks == counters.num_restores > 8
    assert made.parts.transfer.stats.memory_kinds == {"pinned_host"}
print("exact")
"""


def three_heads(folder: Path) -> Path:
    """A random model with SmolLM2's head counts, 9 and 3, and everything else small."""
    m, f, v = 144, 96, 320
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.08).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(v, m) * 5, "model.norm.weight": np.ones(m, np.float32)}
    for i in range(2):
        at = f"model.layers.{i}"
        tensors |= {f"{at}.{name}.weight": np.ones(m, np.float32) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"{at}.self_attn.{name}_proj.weight": weight(n, m) for name, n in (("q", 144), ("k", 48), ("v", 48), ("o", 144))}
        tensors |= {f"{at}.mlp.{name}_proj.weight": weight(f, m) for name in ("gate", "up")}
        tensors[f"{at}.mlp.down_proj.weight"] = weight(m, f)
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", THREE_HEADS)
    return folder


def script(path: Path, devices: int, *parts: str) -> str:
    return COMMON.format(path=str(path), devices=devices) + "".join(parts)


def test_two_devices_split_the_pool_by_kv_heads_give_the_references_tokens_and_park_exactly(run_python: Callable[..., str]) -> None:
    reference = f"""
    expected = np.load({str(LLAMA / "reference.npz")!r})
    for i in (0, 1):
        wish = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
        found = tiny.run(made, [expected[f"input_ids_{{i}}"].tolist()], [wish])
        assert found[0].token_ids == expected[f"greedy_{{i}}"].tolist(), i
"""
    assert run_python(script(LLAMA, 2, SPLIT, reference, EXACT), devices=2) == "exact\n"


def test_three_kv_heads_go_over_three_devices_give_the_tokens_of_one_and_park_exactly(
    run_python: Callable[..., str], tmp_path: Path
) -> None:
    """Greedy tokens only: the bits of logits may differ between meshes, which is why the mesh is part of the fingerprint."""
    dense = """
    from pathlib import Path
    from jax.sharding import Mesh
    from jaxkv.models import dense_logits, load_checkpoint
    model = load_checkpoint(Path(PATH), dtype="float32", mesh=Mesh(np.array(jax.devices()[:1]), ("tensor",))).model
    found = tiny.run(made, [prompts[1]], [params[0]])[0].token_ids
    logits = dense_logits(model, jax.numpy.array([*prompts[1], *found], jax.numpy.int32))
    assert logits.argmax(-1)[20:-1].tolist() == found  # position 20, the prompt's last, foretells the first of them
"""
    assert run_python(script(three_heads(tmp_path), 3, SPLIT, dense, EXACT), devices=3) == "exact\n"


COPIES = """
with tiny.engine(**ENGINE) as made:
    layout, parts = made.parts.layout, made.parts
    assert (layout.num_kv_heads, made.model_config.num_kv_heads) == (DEVICES, KV_HEADS)
    assert {x.addressable_shards[0].data.shape[1] for layer in parts.pool.pages for x in layer} == {1}
    assert any(line.startswith(f"mesh.tensor = {DEVICES} is more than this model's {KV_HEADS} kv heads") for line in parts.messages)
    alone = [tiny.content(c) for c in tiny.alone(made, prompts, params)]
    both = [np.asarray(x).reshape(-1, KV_HEADS, DEVICES // KV_HEADS, *x.shape[2:]) for layer in parts.pool.pages for x in layer]
    assert all(x.any() and np.array_equal(x[:, :, :1].repeat(x.shape[2], axis=2), x) for x in both)  # copies stay copies, bit for bit
with tiny.engine(**ENGINE, debug__park_every=3) as made:
    assert [tiny.content(c) for c in tiny.run(made, prompts, params)] == alone
    assert made.scheduler.counters.num_parks > 8
"""

COPIED = """
from jaxkv.models import load_checkpoint
from jax.sharding import Mesh
from flax import nnx
from jaxkv.models import dense_logits

def logits(num, tokens):
    model = load_checkpoint(PATH, dtype="float32", mesh=Mesh(np.array(jax.devices()[:num]), ("tensor",))).model
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda state: dense_logits(nnx.merge(graph, state), jax.numpy.array(tokens)))(state))

def check(num):
    tokens = prompts[3]
    found, expected = logits(num, tokens), logits(1, tokens)
    assert np.abs(found - expected).max() < 2e-4, np.abs(found - expected).max()
    print(found.shape)
"""


def with_one_kv_head(folder: Path) -> Path:
    """A hybrid whose recurrent heads go over two devices, and whose one kv head does not."""
    copied = fixture_copy("qwen3_5", folder)
    config = json.loads((copied / "config.json").read_text())
    text = config.get("text_config", config)
    text["num_key_value_heads"] = 1
    write_json(copied / "config.json", config)
    change_tensors(
        copied,
        lambda tensors: tensors.update(
            {
                name: x[: len(x) // 2].copy()
                for name, x in tensors.items()
                if name.endswith(("self_attn.k_proj.weight", "self_attn.v_proj.weight"))
            }
        ),
    )
    return copied


@pytest.mark.slow
def test_more_devices_than_kv_heads_have_each_head_several_times_park_exactly_and_say_so(run_python: Callable[..., str]) -> None:
    """The tokens are those of the reference, on four devices and two kv heads."""
    reference = f"""
with tiny.engine(**ENGINE) as made:
    expected = np.load({str(LLAMA / "reference.npz")!r})
    wish = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    found = tiny.run(made, [expected["input_ids_1"].tolist()], [wish])
    assert found[0].token_ids == expected["greedy_1"].tolist()
print("exact")
"""
    assert run_python(script(LLAMA, 4, "KV_HEADS = 2\n", COPIES, reference), devices=4) == "exact\n"


def test_hybrids_have_the_logits_of_one_device_where_kv_heads_are_copied(run_python: Callable[..., str], tmp_path: Path) -> None:
    assert run_python(script(with_one_kv_head(tmp_path), 2, COPIED, "check(2)\n"), devices=2) == "(33, 320)\n"


@pytest.mark.slow
def test_experts_have_the_logits_of_one_device_where_kv_heads_are_copied(run_python: Callable[..., str]) -> None:
    assert run_python(script(LLAMA.parent / "qwen3_moe", 4, COPIED, "check(4)\n"), devices=4) == "(33, 320)\n"


@pytest.mark.slow
def test_experts_and_hybrids_park_exactly_where_kv_heads_are_copied(run_python: Callable[..., str], tmp_path: Path) -> None:
    plain = "from dataclasses import replace\nparams = [replace(wish, context_shift=False, context_len=None) for wish in params]\n"
    moe = script(LLAMA.parent / "qwen3_moe", 4, "KV_HEADS = 2\n", COPIES, "print('exact')\n")
    hybrid = script(with_one_kv_head(tmp_path), 2, "KV_HEADS = 1\n", plain, COPIES, "print('exact')\n")
    assert run_python(moe, devices=4) == run_python(hybrid, devices=2) == "exact\n"


REFUSED = """
import jaxkv.startup

def load_checkpoint(*args, **kwargs):
    raise AssertionError("weights were read")

jaxkv.startup.load_checkpoint = load_checkpoint
try:
    with tiny.engine(**ENGINE):
        pass
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_mesh_that_does_not_divide_the_heads_is_refused_before_anything_is_loaded(run_python: Callable[..., str], tmp_path: Path) -> None:
    said = run_python(script(three_heads(tmp_path), 2, REFUSED), devices=2)
    assert said == (
        "ModelError mesh.tensor = 2 must divide this model's 9 query heads and feed-forward dim 96, and divide its 3 kv heads or be a "
        "multiple of them; allowed: 1, 3\n"
    )


def test_more_devices_than_there_are_are_refused_before_anything_is_loaded(run_python: Callable[..., str]) -> None:
    said = run_python(script(LLAMA, 2, REFUSED), devices=1)
    assert said.startswith("ConfigError mesh.tensor: got 2, but there are 1 cpu devices; lower it")


@pytest.mark.weights
@pytest.mark.slow
def test_smollm2_on_three_devices_gives_the_references_first_tokens_and_parks_exactly(
    run_python: Callable[..., str], smollm2: Path
) -> None:
    body = f"""
reference = json.load(open({str(LLAMA.parent / "smollm2_ref.json")!r}))["prompts"][0]
wish = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)
seen = []
for every in (0, 2):
    ENGINE["pool__tokens"] = 256
    fields = dict(model__max_len=256, pool__page_size=16, scheduler__prefill_chunk=64, scheduler__rows=2)
    with tiny.engine(**ENGINE, **fields, debug__park_every=every) as made:
        (done,) = tiny.run(made, [reference["input_ids"]], wish)
        assert (done.num_parks > 1) == bool(every), done.num_parks
        seen.append(tiny.content(done))
assert seen[0] == seen[1]
assert seen[0][0] == reference["greedy_ids"][:6]
print("exact")
"""
    assert run_python(script(smollm2, 3, body), devices=3) == "exact\n"
