"""`jaxkv plan`: figures that are known from elsewhere, the configurations that come with the package, and what it refuses."""

import json
from pathlib import Path

import jax
import pytest
from flax import nnx

from jaxkv.cli.main import main
from jaxkv.config import load_config
from jaxkv.errors import ConfigError
from jaxkv.models import ModelConfig, load_draft_head
from jaxkv.models.config import Recurrent, Rope
from jaxkv.models.families import FAMILIES
from jaxkv.pool_size import size_pool
from jaxkv.sizing import kv_bytes_per_token, measure, read_shape
from jaxkv.speculate.small import small_layout
from jaxkv.startup import outline, start
from jaxkv.windows import about_windows
from tests.cpu import checkpoints, tiny
from tests.cpu.checkpoints import FIXTURES

CONFIGS = Path(__file__).parents[2] / "configs"
SHAPES = FIXTURES / "shapes"
MIB, GIB = 2**20, 2**30


def shape(name, **fields):
    config = load_config({"model": {"path": name}}, {name.replace("__", "."): value for name, value in fields.items()})
    return config, read_shape(config, SHAPES / f"{name}.json")


def planned(name, memory=None, link=16.0, tokens=None, backend="gpu", **fields):
    return measure(*shape(name, **fields), backend, memory, link, tokens)


def hybrid(num_layers: int, kv_heads: int, hidden: int, value_heads: int) -> ModelConfig:
    """The numbers of Qwen3.5 and 3.6: three layers with a state, one with pages, and so on."""
    layers = tuple(layer for layer in range(num_layers) if (layer + 1) % 4)
    return ModelConfig(
        "qwen3_5", 248_320, num_layers, hidden, 16, kv_heads, 256, 9216, 262_144, 1e-6, Rope(), True, "bfloat16",
        recurrent=Recurrent("delta", layers, value_heads, 128, 16, 128, 4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters", "token_bytes", "sequence_bytes"),
    [
        ("Qwen3.5-4B", 4_205_751_296, 32_768, 51_511_296),
        ("Qwen3.6-35B-A3B", 34_660_610_688, 20_480, 64_389_120),
        ("Qwen3-Next-80B-A3B-Instruct", 79_674_391_296, 24_576, 77_266_944),
        ("mamba-130m-hf", 129_135_360, 0, 2_580_480),
        ("mamba2-130m-hf", 128_989_632, 0, 19_132_416),
        ("smollm2", 134_515_008, 23_040, 0),
        ("Llama-3.1-8B-Instruct", 8_030_261_248, 131_072, 0),
        ("Mistral-7B-v0.1", 7_241_732_096, 131_072, 0),
        ("Qwen2.5-0.5B-Instruct", 494_032_768, 12_288, 0),
        ("Qwen3-0.6B", 596_049_920, 114_688, 0),
        ("Qwen3-30B-A3B", 30_532_122_624, 98_304, 0),
        ("gemma-3-270m-it", 268_098_176, 18_432, 0),
    ],
)
def test_parameters_and_bytes_per_token_are_those_of_the_released_models(name, parameters, token_bytes, sequence_bytes):
    found = planned(name, model__dtype="bfloat16")
    assert (found.num_parameters, found.kv_bytes_per_token, found.state_bytes_per_sequence) == (parameters, token_bytes, sequence_bytes)
    wide = 0 if not sequence_bytes else found.weight_bytes - 2 * parameters  # rates of recurrent layers, which are float32
    assert 0 <= wide < 0.01 * parameters
    assert (found.weight_bytes, found.dtype, found.kv_dtype) == (2 * parameters + wide, "bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("model", "token_bytes", "sequence_bytes"),
    [(hybrid(32, 4, 2560, 32), 32_768, 51_511_296), (hybrid(40, 2, 2048, 32), 20_480, 64_389_120)],
    ids=["Qwen3.5-4B", "Qwen3.6-35B-A3B"],
)
def test_hybrids_pay_per_token_in_a_quarter_of_their_layers_and_once_per_sequence_in_the_others(
    monkeypatch, model, token_bytes, sequence_bytes
):
    monkeypatch.setattr("jaxkv.sizing.weight_numbers", lambda *given: (10**9, 2 * 10**9, 2 * 10**9))
    config = load_config({"model": {"path": "x"}}, {"pool.tokens": 1024, "scheduler.rows": 4, "model.max_len": 1024})
    found = measure(config, model, "gpu", 4 * GIB, 10.0, 100)
    assert kv_bytes_per_token(model, "bfloat16") == found.kv_bytes_per_token == token_bytes
    assert found.state_bytes_per_sequence == sequence_bytes
    assert found.image_bytes == 256 * token_bytes + sequence_bytes  # one chunk of 16 pages of 16 tokens
    assert found.bytes_per_device == 2 * 10**9 + 4 * sequence_bytes + (1024 + 16) * token_bytes + 64 * MIB


def test_what_fits_is_counted_as_the_engine_counts_it():
    found = planned("smollm2", 1 * GIB, pool__tokens=8192, model__max_len=2048, model__dtype="float32", scheduler__rows=3)
    assert (found.pool_tokens, found.pool_bytes) == (8192, (8192 + 16) * 46_080)
    assert found.bytes_per_device == 4 * 134_515_008 + (8192 + 16) * 46_080 + 64 * MIB
    assert (found.fits, found.sequence_tokens, found.sequences_in_pool) == (True, 2048, 3)
    assert planned("smollm2", 512 * MIB, pool__tokens=8192).fits is True  # bfloat16: 257 + 180 + 64 MiB
    assert planned("smollm2", 500 * MIB, pool__tokens=8192).fits is False
    assert planned("smollm2", 1 * GIB, tokens=1000, pool__tokens=4096).sequences_in_pool == 4  # 63 of 256 pages each


def test_a_pool_that_takes_what_memory_there_is():
    found = planned("Llama-3.1-8B-Instruct", 24 * GIB, model__max_len=8192, scheduler__rows=32)
    left = (24 * GIB - 2 * 8_030_261_248) * 0.8 - 64 * MIB
    assert found.pool_tokens == (int(left / (131_072 * 16)) - 1) * 16 == 58_720
    few = planned("Llama-3.1-8B-Instruct", 24 * GIB, model__max_len=1024, scheduler__rows=4)
    assert few.pool_tokens == 4096  # more no row can fill
    unknown = planned("Llama-3.1-8B-Instruct")
    assert (unknown.pool_tokens, unknown.pool_bytes, unknown.fits, unknown.sequences_in_pool) == (None, None, None, None)


def test_a_park_takes_the_images_bytes_over_the_link():
    found = planned("smollm2", link=10.0, tokens=1000, model__dtype="float32", scheduler__host_budget_mib=100)
    assert found.image_bytes == 4 * 256 * 46_080  # 63 pages are 4 chunks of 16 pages of 16 tokens
    assert found.park_s == pytest.approx(4 * 256 * 46_080 / 10e9)
    assert found.images_in_host_budget == 2
    assert planned("smollm2", scheduler__host_budget_mib=None).images_in_host_budget is None


def test_on_a_mesh_each_device_has_its_part():
    found = planned("Llama-3.1-8B-Instruct", 24 * GIB, mesh__tensor=4, model__max_len=8192, pool__tokens=8192)
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    split, whole = layers + 2 * 128_256 * 4096, (2 * 32 + 1) * 4096
    assert (found.num_parameters, found.weight_bytes_per_device) == (split + whole, 2 * (split // 4 + whole))
    assert found.bytes_per_device == found.weight_bytes_per_device + 16 * MIB + (8192 + 16) * 131_072 // 4


def test_more_devices_than_kv_heads_each_have_one_so_tokens_cost_more():
    two, four = (planned("Qwen3.6-35B-A3B", mesh__tensor=num, model__dtype="bfloat16") for num in (2, 4))
    assert (two.kv_bytes_per_token, four.kv_bytes_per_token) == (20_480, 40_960)
    assert two.num_parameters == four.num_parameters == 34_660_610_688
    split = 2 * (two.weight_bytes - two.weight_bytes_per_device)
    copied = 10 * 2 * 2048 * 2 * 256 * 2  # layers with pages, k and v, model dim, kv heads, head dim, bytes
    assert four.weight_bytes_per_device == two.weight_bytes - split + (split + copied) // 4


def test_int8_takes_a_byte_and_scales():
    wide, narrow = planned("smollm2", model__dtype="bfloat16"), planned("smollm2", model__dtype="bfloat16", model__weight_dtype="int8")
    products, channels = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536), 30 * (2 * 576 + 2 * 192 + 2 * 1536 + 576)
    assert (narrow.num_parameters, narrow.weight_bytes) == (wide.num_parameters, wide.weight_bytes - products + 4 * channels)
    assert planned("smollm2", pool__kv_dtype="int8").kv_bytes_per_token == 2 * 30 * 3 * (64 + 4)
    assert planned("Qwen3-30B-A3B", model__weight_dtype="int8").weight_bytes < 31.5e9


def test_types_left_to_the_backend_are_float32_on_a_cpu_and_the_checkpoints_own_elsewhere():
    assert planned("smollm2", backend="cpu").kv_bytes_per_token == 2 * planned("smollm2", backend="tpu").kv_bytes_per_token == 46_080
    assert planned("smollm2", backend="cpu", pool__kv_dtype="bfloat16").kv_bytes_per_token == 23_040


def test_a_folder_with_nothing_but_a_config_is_enough(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text((SHAPES / "smollm2.json").read_text())
    (tmp_path / "c.yaml").write_text(f"model: {{path: {tmp_path / 'model'}}}\npool: {{tokens: 768}}\n")
    assert main(["plan", str(tmp_path / "c.yaml"), "--memory-gib", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model                      llama in bfloat16",
        "parameters                 134,515,008",
        "weights                    256.57 MiB",
        "KV bytes per token         23,040 (bfloat16)",
        "state bytes per sequence   0",
        "pool                       768 tokens, 17.23 MiB",
        "in use on a device         337.79 MiB: weights, pool, states of all rows, staging",
        "fits 1.00 GiB              yes",
        "at 8,192 tokens each       0 sequences in the pool at once",
        "image of 8,192 tokens      180.00 MiB; 45 in scheduler.host_budget_mib",
        "park or restore            11.8 ms at 16 GB/s",
    ]
    assert main(["plan", str(tmp_path / "c.yaml"), "--json", "--pool.tokens", "null"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_parameters"], found["pool_tokens"]) == (134_515_008, None)


def test_the_figures_are_those_of_the_engine():
    plan = outline(tiny.config())
    found = measure(tiny.config(), plan.info.config, "cpu", None, 16.0, 1)
    assert found.kv_bytes_per_token * plan.layout.page_size == plan.layout.page_bytes
    assert (found.pool_tokens, found.pool_bytes) == (plan.layout.num_tokens, plan.layout.num_bytes)
    assert (found.image_bytes, found.dtype, found.max_len) == (4 * plan.layout.page_bytes, plan.dtype, plan.shapes.max_len)


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.relative_to(CONFIGS).as_posix())
def test_every_configuration_that_comes_with_the_package_can_be_planned(path, capsys):
    model = load_config(path).model.path.rpartition("/")[2]
    assert main(["plan", str(path), "--shape", str(SHAPES / f"{model}.json"), "--memory-gib", "96", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and (found["pool_tokens"] > 0 or not found["kv_bytes_per_token"])
    assert found["model_type"] in FAMILIES and (path.parent.name != "models" or found["model_type"] == path.stem)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "none.json"], "cannot read none.json: No such file or directory"),
        (["--shape", "bad.json"], "bad.json is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        (["--shape", "list.json"], "list.json must hold an object, as a model's config.json does, got a list"),
        (["--memory-gib", "0"], "--memory-gib: got 0.0, allowed: more than 0"),
        (["--link-gb-s", "-1"], "--link-gb-s: got -1.0, allowed: more than 0"),
        (["--tokens", "0"], "--tokens: got 0, allowed: more than 0"),
        (
            ["--shape", str(SHAPES / "smollm2.json"), "--speculate.kind", "mtp"],
            "speculate.kind: got mtp, but llama has no draft head; take ngram or none",
        ),
        (["--backend", "npu"], "--backend: got 'npu', allowed: cpu | gpu | tpu"),
        (
            ["--model.path", "none"],
            "model.path: there is no file or folder 'none', and no known model of that name (smollm2); without it give its config.json: "
            "--shape FILE",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("model: {path: x}\n")
    Path("bad.json").write_text("x")
    Path("list.json").write_text("[]")
    assert main(["plan", "c.yaml", *words]) == 2
    assert capsys.readouterr() == ("", f"jaxkv: error: {message}\n")


def test_where_every_layer_has_a_window_a_long_sequence_takes_no_more_than_that():
    fields = {"model__dtype": "bfloat16", "model__max_len": 32_768, "scheduler__rows": 32}
    found = planned("Mistral-7B-v0.1", pool__tokens=65_536, **fields)
    assert found.image_bytes == 4096 * 131_072  # 16 chunks of 16 pages of 16 tokens: cells 28,672 to 32,767
    assert found.sequences_in_pool == 4096 // (4096 // 16 + 64 // 16 + 1)  # pages of the window, of a chunk, and one
    ample = planned("Mistral-7B-v0.1", 4096 * GIB, **fields)
    assert ample.pool_tokens == 32 * (4096 + 64 + 16)
    kept = planned("mamba-130m-hf", pool__state_snapshots=8, scheduler__rows=4, model__dtype="bfloat16")
    plain = planned("mamba-130m-hf", scheduler__rows=4, model__dtype="bfloat16")
    assert (kept.bytes_per_device or 0) - (plain.bytes_per_device or 0) == 8 * 2_580_480


def test_layers_with_a_window_beside_others_take_pages_for_all_rows_and_no_more():
    fields = {"model__path": str(FIXTURES / "gemma3"), "pool__tokens": 256}
    plan = outline(tiny.config(**fields))
    found = measure(tiny.config(**fields), plan.info.config, "cpu", None, 16.0, 100)
    page = plan.layout.page_bytes  # of one layer of four
    assert (plan.layout.near, plan.layout.near_pages, found.kv_bytes_per_token * 4) == ((0, 1, 2), 28, 4 * page)
    assert (found.pool_tokens, found.pool_bytes) == (256, plan.layout.num_bytes) == (256, 65 * page + 29 * 3 * page)
    assert found.image_bytes == 7 * 4 * page + 2 * 4 * 3 * page  # 25 pages in chunks of 4; of the others pages 21 to 24
    assert found.window == f"16 tokens in 3 of 4 layers; 112 tokens of their own, {29 * 3 * page / MIB:.1f} MiB of the pool's bytes"
    shifting = measure(tiny.config(**fields, request__context_shift=True), plan.info.config, "cpu", None, 16.0, 100)
    assert (shifting.pool_bytes, shifting.image_bytes) == (65 * 4 * page, 7 * 4 * 4 * page)
    memory = 4 * GIB
    ample = planned("gemma-3-270m-it", memory, model__dtype="bfloat16", model__max_len=32_768, scheduler__rows=8)
    near, free = 8 * 37 * 16, memory - 2 * 268_098_176
    assert ample.pool_bytes == (ample.pool_tokens + 16) * 3_072 + (near + 16) * 15_360
    assert ample.pool_tokens == 8 * 32_768 and free * 0.8 > ample.pool_bytes


def test_a_draft_head_is_counted_with_its_weights_and_a_layer_of_keys_in_pool_and_images():
    fields = {"model__path": str(FIXTURES / "qwen3_5"), "speculate__kind": "mtp"}
    plan = outline(tiny.config(**fields))
    found = measure(tiny.config(**fields), plan.info.config, "cpu", None, 16.0, 1)
    alone = measure(tiny.config(model__path=str(FIXTURES / "qwen3_5")), plan.info.config, "cpu", None, 16.0, 1)
    assert found.kv_bytes_per_token * plan.layout.page_size == plan.layout.page_bytes
    assert (found.pool_bytes, alone.kv_bytes_per_token * 2) == (plan.layout.pages_bytes, found.kv_bytes_per_token)
    head = load_draft_head(plan.info, dtype="float32", mesh=plan.mesh)
    assert found.weight_bytes - alone.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(head)))
    assert found.image_bytes - alone.image_bytes == 4 * 4 * alone.kv_bytes_per_token


def test_a_small_model_that_guesses_is_counted_beside_the_pool_and_in_no_image():
    fields = {"speculate__kind": "draft", "speculate__draft_path": str(tiny.LLAMA)}
    plan = outline(tiny.config())
    alone = measure(tiny.config(), plan.info.config, "cpu", None, 16.0, 1)
    found = measure(tiny.config(**fields), plan.info.config, "cpu", None, 16.0, 1)  # it guesses for itself
    assert (found.pool_bytes, found.weight_bytes) == (2 * (alone.pool_bytes or 0), 2 * alone.weight_bytes)
    assert (found.kv_bytes_per_token, found.image_bytes) == (alone.kv_bytes_per_token, alone.image_bytes)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"request__context_shift": True}, "request.context_shift: true"),
        ({"pool__tokens": 108}, "pages of their own would be no fewer"),
    ],
)
def test_layers_with_a_window_that_share_one_table_with_others_keep_all_pages_and_it_is_said(fields, why):
    config = tiny.config(**{"model__path": str(FIXTURES / "gemma3"), "pool__tokens": 256, **fields})
    plan = outline(config)
    found = measure(config, plan.info.config, "cpu", None, 16.0, 100)
    assert (plan.layout.near, found.pool_bytes) == ((), plan.layout.num_bytes)
    assert found.image_bytes == 7 * 4 * plan.layout.page_bytes  # 25 pages of all layers in chunks of 4
    assert found.window == f"16 tokens in 3 of 4 layers; all pages are kept: {why}"
    said = about_windows(config, plan.info.config, plan.layout, 128)
    expected = (
        f"3 of 4 layers see the last 16 tokens, and keep all pages until a sequence ends, as with {why} they have one table with the others"
    )
    assert said == ([] if "no fewer" in why else [expected])


@pytest.mark.parametrize("memory", [2_400_000, 2_800_000, 64 * MIB])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {}),
        ("gemma3", {}),
        ("gemma3", {"scheduler__prefill_chunk": 7, "pool__page_size": 1}),
        ("gemma3", {"speculate__kind": "ngram"}),
        ("gemma3", {"speculate__kind": "ngram", "speculate__num_draft": 16, "scheduler__prefill_chunk": 4}),
        ("mistral", {}),
        ("qwen3_5", {"pool__state_snapshots": 4, "scheduler__rows": 3}),
        ("qwen3_5", {"speculate__kind": "mtp", "pool__kv_dtype": "int8"}),
        ("qwen3", {"speculate__kind": "draft", "speculate__draft_path": str(FIXTURES / "llama")}),
        ("mamba", {}),
    ],
    ids=str,
)
def test_the_pool_that_a_memory_decides_is_as_large_as_the_engine_makes_it(monkeypatch, name, fields, memory):
    fields = {"model__path": str(FIXTURES / name), "pool__tokens": None, "transfer__staging_mib": 1, "pool__memory_fraction": 0.9, **fields}
    config = tiny.config(**fields)
    plan = outline(config)
    guessing = 0 if plan.small is None else small_layout(plan.layout, plan.small.config, 1).page_bytes
    monkeypatch.setattr("jaxkv.pool_size.available_memory_bytes", lambda: memory)  # behind all weights
    layout = size_pool(config, plan.info.config, plan.layout, plan.shapes, checkpoints.one_device(), guessing)
    weights = measure(config, plan.info.config, "cpu", None, 16.0).weight_bytes
    found = measure(config, plan.info.config, "cpu", memory + weights, 16.0)
    assert found.pool_tokens == layout.num_tokens
    assert found.pool_bytes == layout.pages_bytes + (layout.num_pages + 1) * guessing
    assert found.bytes_per_device == weights + MIB + layout.num_bytes + (layout.num_pages + 1) * guessing


def test_a_small_model_that_guesses_is_loaded_before_the_pool_takes_what_memory_is_left(monkeypatch):
    seen = []

    def stop(*given):
        seen.append("pool")
        raise ConfigError("enough")

    monkeypatch.setattr("jaxkv.startup.load_small", lambda *given: seen.append("small"))
    monkeypatch.setattr("jaxkv.startup.size_pool", stop)
    with pytest.raises(ConfigError, match="enough"):
        start(tiny.config(speculate__kind="draft", speculate__draft_path=str(tiny.LLAMA)))
    assert seen == ["small", "pool"]


def test_over_devices_sums_are_split_and_windows_of_convolutions_are_on_each():
    one, two = (planned("Qwen3.5-4B", model__dtype="bfloat16", mesh__tensor=num, pool__tokens=1024, scheduler__rows=4) for num in (1, 2))
    sums, windows = 24 * 32 * 128 * 128 * 4, 24 * 3 * (2 * 16 * 128 + 32 * 128) * 2
    assert one.state_bytes_per_sequence == two.state_bytes_per_sequence == sums + windows == 51_511_296
    assert two.bytes_per_device == two.weight_bytes_per_device + 32 * MIB + (1024 + 16) * 32_768 // 2 + 4 * (sums // 2 + windows)


@pytest.mark.parametrize(
    ("name", "token_bytes", "head_bytes", "state_bytes"),
    [("Qwen3.5-4B", 32_768, 4096, 51_511_296), ("Qwen3.6-35B-A3B", 20_480, 2048, 64_389_120)],
)
def test_what_is_printed_of_the_named_shapes_is_without_their_draft_head_unless_that_guesses(
    tmp_path, capsys, name, token_bytes, head_bytes, state_bytes
):
    (tmp_path / "c.yaml").write_text("model: {path: x}\npool: {tokens: 4096}\n")
    for kind, more in (("none", 0), ("ngram", 0), ("mtp", head_bytes)):
        words = ["--shape", str(SHAPES / f"{name}.json"), "--speculate.kind", kind, "--tokens", "1000"]
        assert main(["plan", str(tmp_path / "c.yaml"), *words]) == 0
        said = {line[:27].strip(): line[27:] for line in capsys.readouterr().out.splitlines()}
        assert said["KV bytes per token"] == f"{token_bytes + more:,} (bfloat16)"
        assert said["state bytes per sequence"] == f"{state_bytes:,}"
        pool, image = (4096 + 16) * (token_bytes + more), 4 * 256 * (token_bytes + more) + state_bytes
        assert said["pool"] == f"4,096 tokens, {pool / MIB:.2f} MiB"
        assert said["image of 1,000 tokens"].startswith(f"{image / MIB:.2f} MiB")
