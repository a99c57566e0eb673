"""Programs that are kept on disk: the same bytes without tracing, another key for whatever is different, made again where in doubt."""

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

import jaxkv.program_key
import jaxkv.program_store
import jaxkv.programs
from jaxkv.models import Checkpoint, ModelConfig
from jaxkv.observe.programs import weightless_model
from jaxkv.page_programs import transfer_recipes
from jaxkv.pool import PoolLayout, pool_sharding
from jaxkv.program_key import Unknown, machine_facts, source_facts, source_files, tell
from jaxkv.program_store import ProgramStore, open_store
from jaxkv.programs import Recipe, Shapes, step_recipes
from jaxkv.request import SamplingParams
from jaxkv.transfer import host_sharding
from tests.cpu import tiny
from tests.cpu.checkpoints import LLAMA, load, one_device


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder in the place of JAX's cache; the programs' own is in it."""
    with option("compilation_cache_dir", str(tmp_path / "xla")):
        compilation_cache.reset_cache()
        yield tmp_path / "xla" / "programs"
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load(LLAMA)


@contextmanager
def option(name: str, value: Any) -> Iterator[None]:
    """One of JAX's options for a while."""
    before = jax.config.values[f"jax_{name}"]
    jax.config.update(f"jax_{name}", value)
    try:
        yield
    finally:
        jax.config.update(f"jax_{name}", before)


def files(folder: Path) -> dict[str, list[str]]:
    """What lies in the folder, by ending."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        found.setdefault(path.suffix, []).append(path.name)
    return found


# Engines


def test_a_second_start_traces_nothing_and_its_answers_are_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [tiny.prompt(n) for n in (5, 19, 30)]
    wishes = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=n, logprobs=3) for n in range(3)]
    with tiny.engine(debug__park_every=4) as made:
        fresh = [tiny.content(answer) for answer in tiny.run(made, prompts, wishes)]
        facts = [(p.name, p.temp_bytes, p.flops) for p in made.parts.programs.all()]
    assert {ending: len(names) for ending, names in files(folder).items()} == {".made-of": len(facts), ".program": len(facts), ".used": 1}

    monkeypatch.setattr(jaxkv.programs, "jit_recipe", None)
    with tiny.engine(debug__park_every=4) as made:
        before = made.parts.pool.arrays
        places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(before)]
        kept = [tiny.content(answer) for answer in tiny.run(made, prompts, wishes)]
        assert made.scheduler.counters.num_parks > 3
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(made.parts.pool.arrays)] == places
        assert [(p.name, p.temp_bytes, p.flops) for p in made.parts.programs.all()] == facts
    assert kept == fresh


def test_another_pool_is_another_program(folder: Path) -> None:
    for tokens in (64, 128):
        with tiny.engine(pool__tokens=tokens):
            pass
    assert len(files(folder)[".program"]) == 12  # six each


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file in its place")
    with tiny.engine() as made:
        assert len(tiny.run(made, [tiny.prompt(5)], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


# One program


def store(folder: Path, **facts: str) -> ProgramStore:
    return ProgramStore(folder, one_device(), facts.get("facts", "this machine"), facts.get("sources", "these sources"))


def times(factor: float) -> Recipe:
    """A small program that closes over a number."""

    def multiply(x: Any) -> Any:
        return {"product": x * factor}

    return Recipe(multiply, (np.zeros(4, np.float32),), None, None)


def build(kept: ProgramStore, recipe: Recipe, *, compiles: int = 1, traces: int = 1, options: str = "") -> np.ndarray:
    """Build it, run it, and hold it to having traced and compiled so often."""
    num = {"traces": 0, "compiles": 0}

    class Counted:
        def __init__(self, lowered: Any) -> None:
            self.lowered = lowered

        def __getattr__(self, name: str) -> Any:
            num["compiles"] += name == "compile"
            return getattr(self.lowered, name)

    def lower() -> Any:
        num["traces"] += 1
        return Counted(jax.jit(recipe.function).lower(*recipe.arguments))

    found = kept.build(recipe, lower, options)
    assert (num["traces"], num["compiles"]) == (traces, compiles)
    return np.asarray(found.run(np.arange(4, dtype=np.float32))["product"])


def test_a_program_is_traced_and_compiled_once(tmp_path: Path) -> None:
    assert build(store(tmp_path), times(3.0)).tolist() == [0, 3, 6, 9]
    assert build(store(tmp_path), times(3.0), traces=0, compiles=0).tolist() == [0, 3, 6, 9]
    assert build(store(tmp_path), times(5.0)).tolist() == [0, 5, 10, 15]


def test_a_change_of_sources_that_changes_no_program_costs_a_trace_once(tmp_path: Path) -> None:
    build(store(tmp_path), times(3.0))
    assert build(store(tmp_path, sources="others"), times(3.0), traces=1, compiles=0).tolist() == [0, 3, 6, 9]
    build(store(tmp_path, sources="others"), times(3.0), traces=0, compiles=0)


def test_another_machine_or_other_options_compile_anew(tmp_path: Path) -> None:
    build(store(tmp_path), times(3.0))
    build(store(tmp_path, facts="another machine"), times(3.0))
    build(store(tmp_path), times(3.0), options="{'flag': 1}")


def test_a_program_that_jaxs_own_cache_has_is_compiled_all_the_same(folder: Path) -> None:
    """What comes out of JAX's cache cannot be serialised again: a function is missing when it runs."""
    recipe = times(7.0)
    jax.jit(recipe.function).lower(*recipe.arguments).compile()
    kept = open_store(one_device())
    assert kept is not None
    build(kept, recipe)
    assert build(kept, recipe, traces=0, compiles=0).tolist() == [0, 7, 14, 21]
    assert jax.config.values["jax_enable_compilation_cache"] is True


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
        lambda data: b"jaxkv program 0\n" + data[16:],
        lambda data: jaxkv.program_store.sealed(b"no pickle"),
        lambda data: jaxkv.program_store.sealed(b"N."),  # a pickle of None
    ],
    ids=["empty", "cut", "one bit", "another format", "no pickle", "another pickle"],
)
def test_a_damaged_program_is_made_again_and_is_whole_afterwards(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    build(store(tmp_path), times(3.0))
    (path,) = tmp_path.glob("*.program")
    path.write_bytes(damage(path.read_bytes()))
    assert build(store(tmp_path), times(3.0)).tolist() == [0, 3, 6, 9]
    build(store(tmp_path), times(3.0), traces=0, compiles=0)
    assert {ending: len(names) for ending, names in files(tmp_path).items()} == {".made-of": 1, ".program": 1}


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"../../etc/passwd", b"0" * 64])
def test_a_damaged_name_costs_a_trace(tmp_path: Path, text: bytes) -> None:
    build(store(tmp_path), times(3.0))
    (path,) = tmp_path.glob("*.made-of")
    path.write_bytes(text)
    build(store(tmp_path), times(3.0), traces=1, compiles=0)
    build(store(tmp_path), times(3.0), traces=0, compiles=0)


def test_what_has_no_key_is_traced_every_time_and_compiled_once(tmp_path: Path) -> None:
    class Odd:
        factor = 3.0

    def made_with(odd: Odd) -> Recipe:
        return dataclasses.replace(times(0), function=lambda x: {"product": x * odd.factor})

    odd = Odd()
    build(store(tmp_path), made_with(odd), traces=1, compiles=1)
    build(store(tmp_path), made_with(odd), traces=1, compiles=0)
    odd.factor = 4.0
    assert build(store(tmp_path), made_with(odd)).tolist() == [0, 4, 8, 12]


def test_a_program_that_cannot_be_serialised_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxkv.program_store.serialize_executable, "serialize", None)
    assert build(store(tmp_path), times(3.0)).tolist() == [0, 3, 6, 9]
    assert list(tmp_path.glob("*.program")) == []


def test_what_the_last_start_of_a_kind_used_is_loaded_on_a_thread_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store(tmp_path)
    build(first, times(3.0)), build(first, times(5.0))
    first.note_used("this kind")
    loaded: list[str] = []
    plain = ProgramStore._read

    def read(self: ProgramStore, name: str) -> Any:
        loaded.append(threading.current_thread().name)
        return plain(self, name)

    monkeypatch.setattr(ProgramStore, "_read", read)
    later = store(tmp_path)
    later.load_ahead("this kind")
    assert build(later, times(5.0), traces=0, compiles=0).tolist() == [0, 5, 10, 15]
    assert build(later, times(3.0), traces=0, compiles=0).tolist() == [0, 3, 6, 9]
    assert [name.rsplit("_", 1)[0] for name in loaded] == ["jaxkv-programs"] * 2
    later.note_used("this kind")  # in another order
    for kind, facts in (("another kind", {}), ("this kind", {"facts": "another machine"})):
        other = store(tmp_path, **facts)
        other.load_ahead(kind)
        other.note_used(kind)
    assert len(loaded) == 2
    assert len(files(tmp_path)[".used"]) == 1


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"../x", b"0" * 64, None], ids=["empty", "no text", "a path", "no such program", "one gone bad"]
)
def test_a_list_that_is_wrong_costs_time_and_nothing_else(tmp_path: Path, text: bytes | None) -> None:
    first = store(tmp_path)
    build(first, times(3.0))
    first.note_used("this kind")
    (path,) = tmp_path.glob("*.used" if text is not None else "*.program")
    path.write_bytes(text or b"")
    later, damaged = store(tmp_path), int(text is None)
    later.load_ahead("this kind")
    assert build(later, times(3.0), traces=damaged, compiles=damaged).tolist() == [0, 3, 6, 9]
    later.note_used("this kind")
    assert len(next(tmp_path.glob("*.used")).read_text()) == 64


def test_there_is_no_store_without_a_cache_on_several_devices_or_elsewhere(folder: Path) -> None:
    assert open_store(one_device()) is not None
    assert open_store(Mesh(np.array(jax.devices() * 2), ("tensor",))) is None
    for name, value in (("compilation_cache_dir", None), ("compilation_cache_dir", "gs://b"), ("enable_compilation_cache", False)):
        with option(name, value):
            assert open_store(one_device()) is None


def test_there_is_no_store_while_sources_are_being_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxkv.program_key, "LOADED_S", 0.0)
    assert open_store(one_device()) is None


# Keys

SHAPES = Shapes(rows=4, chunk=8, max_len=128, vocab_size=320, transfer_pages=4)
LAYOUT = PoolLayout(3, 16, 4, 2, 16, "float32", "float32")


def recipes(config: ModelConfig, layout: PoolLayout = LAYOUT, shapes: Shapes = SHAPES, dtype: str = "float32", hold: bool = False) -> Any:
    mesh = one_device()
    made = step_recipes(weightless_model(config, dtype, mesh), layout, shapes, mesh)
    return made | transfer_recipes(layout, shapes.transfer_pages, mesh, host_sharding(pool_sharding(mesh)) if hold else None)


def test_every_part_of_a_recipe_is_part_of_its_key(checkpoint: Checkpoint) -> None:
    config, layout, shapes = (
        checkpoint.config,
        functools.partial(dataclasses.replace, LAYOUT),
        functools.partial(dataclasses.replace, SHAPES),
    )
    rope = dataclasses.replace(config.rope, theta=config.rope.theta + 1)
    variants: list[Any] = [
        recipes(config),
        recipes(dataclasses.replace(config, norm_eps=1e-4)),
        recipes(dataclasses.replace(config, rope=rope)),
        recipes(dataclasses.replace(config, num_layers=2)),
        recipes(config, dtype="bfloat16"),
        *(recipes(config, layout(**{name: value})) for name, value in (("num_pages", 17), ("page_size", 8))),
        *(recipes(config, layout(dtype=dtype, storage=storage)) for dtype, storage in (("bfloat16", "uint16"), ("float16", "float16"))),
        *(recipes(config, shapes=shapes(**{name: value})) for name, value in (("rows", 5), ("chunk", 16), ("max_len", 256))),
    ]
    for name, is_nothing_to in (("prefill", "rows"), ("decode", "chunk")):  # a few rows more or less: 16 first tokens may be drawn anyway
        told = [tell(variant[name]) for variant in variants]
        assert len(set(told)) == len(told) - 1, name
        assert told[{"rows": -3, "chunk": -2}[is_nothing_to]] == told[0], name
    many = recipes(config, shapes=shapes(rows=17))
    assert tell(many["prefill"]) not in [tell(variant["prefill"]) for variant in variants]
    moves = [recipes(config, LAYOUT, shapes(transfer_pages=n), hold=hold) for n in (4, 8) for hold in (False, True)]
    assert len({tell(move["gather"]) for move in moves}) == 4
    donations = [dataclasses.replace(times(1.0), donate=donate) for donate in (None, 0)]
    assert len({tell(recipe) for recipe in donations}) == 2


def test_matmul_precision_is_part_of_the_key(tmp_path: Path) -> None:
    keys = set()
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            keys.add(store(tmp_path)._made_of(times(1.0), ""))
    assert len(keys - {None}) == 2


def test_a_function_is_told_with_what_it_closes_over_and_its_defaults() -> None:
    def outer(inner: Callable[[int], int]) -> Callable[[int], int]:
        return lambda x: inner(x)

    def make(n: int) -> Callable[[int], int]:
        return lambda x: x + n

    def default(n: int) -> Callable[..., int]:
        def f(x: int, m: int = n, *, k: int = n) -> int:
            return x

        return f

    assert tell(outer(make(1))) == tell(outer(make(1)))
    assert tell(outer(make(1))) != tell(outer(make(2)))
    assert tell(default(1)) != tell(default(2))
    assert tell(functools.partial(make, 1)) != tell(functools.partial(make, 2))


def test_values_that_look_alike_are_told_apart() -> None:
    values: list[Any] = [1, 1.0, True, "1", b"1", None, (1,), [1], {1}, {1: 1}, np.int32(1), np.float32(1), np.array([1]), np.array([1.0])]
    values += [np.array([[1]]), ((1, 2), 3), (1, (2, 3)), np.zeros(3000), np.ones(3000)]
    assert len({tell(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    "value", [object(), jax.numpy, {"x": [object()]}, os.path.join], ids=["object", "module", "deep inside", "not ours"]
)
def test_what_is_not_known_by_heart_has_no_key(value: Any) -> None:
    with pytest.raises(Unknown):
        tell(value)


def test_a_key_is_the_same_in_every_process(run_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from jaxkv.program_key import digest, tell, machine_facts, source_facts\n"
        "from tests.cpu.test_program_store import recipes\n"
        "from tests.cpu.checkpoints import LLAMA, one_device\n"
        "from jaxkv.models import inspect_checkpoint\n"
        "made = recipes(inspect_checkpoint(LLAMA).config)\n"
        "print(digest(machine_facts(one_device()), source_facts(), *map(tell, made.values())))\n"
    )
    printed = set()
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        printed.add(run_python(source))
    assert len(printed) == 1


def test_versions_flags_options_and_processors_are_part_of_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [machine_facts(one_device())]
    with monkeypatch.context() as patched:
        patched.setattr(jaxkv.program_key, "version", lambda name: "0.0.1" if name == "jaxlib" else "1")
        found.append(machine_facts(one_device()))
    with monkeypatch.context() as patched:
        patched.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        found.append(machine_facts(one_device()))
    with monkeypatch.context() as patched:
        patched.setattr(jaxkv.program_key, "cpu_identity", lambda: "another processor")
        found.append(machine_facts(one_device()))
    with monkeypatch.context() as patched:
        patched.setattr(os, "cpu_count", lambda: 999)
        found.append(machine_facts(one_device()))
    with option("default_prng_impl", "rbg"):
        found.append(machine_facts(one_device()))
    assert len(set(found)) == len(found)
    with option("compilation_cache_dir", "/elsewhere"):  # where it is kept does not matter
        assert machine_facts(one_device()) == found[0]


def test_sources_are_ours_and_those_of_the_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {path.name for path in source_files()}
    assert {"programs.py", "attention.py", "sampling.py", "llama.py", "layers.py"} <= names
    one, two = tmp_path / "a.py", tmp_path / "b.py"
    found = []
    for first, second in (("x", "y"), ("x", "z"), ("xy", ""), ("", "xy")):
        one.write_text(first)
        two.write_text(second)
        for path in (one, two):
            os.utime(path, (0, 0))
        monkeypatch.setattr(jaxkv.program_key, "source_files", lambda: iter([one, two]))
        found.append(source_facts())
    assert len(set(found)) == 4
    one.write_text("changed just now")
    with pytest.raises(Unknown, match=r"a\.py was changed after it was loaded"):
        source_facts()
    one.unlink()
    with pytest.raises(Unknown, match=r"a\.py"):
        source_facts()
