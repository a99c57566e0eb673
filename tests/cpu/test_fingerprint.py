"""The fingerprint: another one wherever the same request could get other bytes."""

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from jaxkv.fingerprint import fingerprint, fingerprint_facts
from jaxkv.models import Checkpoint
from jaxkv.models.hf_tokenizer import HfTokenizer, bpe_tokenizer, read_tokenizer
from jaxkv.pool import PoolLayout
from jaxkv.programs import Shapes
from tests.cpu.checkpoints import LLAMA, load, one_device

LAYOUT = PoolLayout(num_layers=3, num_pages=16, page_size=4, num_kv_heads=2, head_dim=16, dtype="float32", storage="float32")
SHAPES = Shapes(rows=4, chunk=8, max_len=128, vocab_size=320, transfer_pages=4)


def of(checkpoint: Checkpoint, layout: PoolLayout = LAYOUT, shapes: Shapes = SHAPES, weight_dtype: str | None = None) -> str:
    return fingerprint(fingerprint_facts(checkpoint, "float32", weight_dtype, layout, shapes, one_device()))


def tokenizer(template: str) -> HfTokenizer:
    return bpe_tokenizer(
        tokens=["a", "b", "ab", "<e>"], merges=["a b"], pre="gpt-2", special={"<e>"}, added=set(), bos=None, eos="<e>", add_bos=False,
        chat_template=template, where="here",
    )  # fmt: skip


def test_the_same_weights_read_otherwise_have_another_fingerprint() -> None:
    plain = load(LLAMA)
    with_rope = replace(plain, config=replace(plain.config, rope=replace(plain.config.rope, theta=1e4)))
    others = [
        with_rope,
        replace(plain, config=replace(plain.config, norm_eps=1e-6)),
        replace(plain, eos_ids=frozenset({2, 7})),
        replace(plain, weights_sha256="0" * 64),
        replace(plain, tokenizer=tokenizer("{{ messages }}")),
        replace(plain, tokenizer=tokenizer("{{ messages }}!")),
    ]
    assert len({of(plain), *map(of, others)}) == 1 + len(others)


def test_keys_and_values_or_weights_in_int8_count() -> None:
    plain = load(LLAMA)
    assert len({of(plain), of(plain, weight_dtype="int8"), of(plain, replace(LAYOUT, dtype="int8", storage="int8"))}) == 3


def test_page_size_and_widths_count_and_the_pool_and_the_transfer_do_not() -> None:
    plain = load(LLAMA)
    others = [replace(SHAPES, rows=5), replace(SHAPES, chunk=16), replace(SHAPES, max_len=96)]
    assert len({of(plain), of(plain, replace(LAYOUT, page_size=8)), *(of(plain, shapes=shapes) for shapes in others)}) == 5
    assert of(plain) == of(plain, replace(LAYOUT, num_pages=999), replace(SHAPES, transfer_pages=16))


def test_a_tokenizer_that_was_saved_and_read_again_is_the_same(tmp_path: Path) -> None:
    made = tokenizer("{{ messages }}")
    made.save(tmp_path)
    again = read_tokenizer(tmp_path)
    assert again is not None and again.sha256() == made.sha256()
    changed = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    changed.add_tokens(["c"])
    changed.save(str(tmp_path / "tokenizer.json"))
    other = read_tokenizer(tmp_path)
    assert other is not None and other.sha256() != made.sha256()
