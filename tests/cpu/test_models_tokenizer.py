import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxkv.models import ByteTokenizer, ModelError, load_tokenizer, save_converted
from jaxkv.models.gguf_file import read_gguf
from jaxkv.models.hf_tokenizer import LONG_TEXT, HfTokenizer, bpe_tokenizer, read_tokenizer
from jaxkv.models.load_gguf import gguf_tokenizer
from tests.cpu.checkpoints import llama_copy, load, write_gguf, write_json

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *BYTES, "Ġa", "aa"]  # ids 0 to 2, 3 to 258, 259, 260


def tiny(**changes: Any) -> HfTokenizer:
    settings: dict[str, Any] = {
        "tokens": TOKENS,
        "merges": ["Ġ a", "a a"],
        "pre": "smollm",
        "special": set(SPECIAL),
        "added": set(),
        "bos": "<|im_start|>",
        "eos": "<|im_end|>",
        "add_bos": False,
        "chat_template": TEMPLATE,
        "where": "tiny.gguf",
    }
    return bpe_tokenizer(**{**settings, **changes})


def test_text_is_cut_at_every_digit_before_merging() -> None:
    tokenizer = tiny(tokens=[*TOKENS, "12"], merges=["1 2", "Ġ a"])
    assert len(tokenizer.encode("12")) == 2
    assert tokenizer.encode(" a") == [259]
    assert len(tiny(tokens=[*TOKENS, "12"], merges=["1 2"], pre="gpt-2").encode("12")) == 1


def test_special_tokens_spelled_out_become_their_single_id() -> None:
    assert tiny().encode("<|im_start|>aa<|im_end|>") == [1, 260, 2]


def test_a_long_text_lets_other_threads_run_and_has_the_ids_it_would_have_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, asked = tiny(), []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(tokenizer._tokenizer, name)

    watched = HfTokenizer(tokenizer._tokenizer)
    monkeypatch.setattr(watched, "_tokenizer", Watched())
    text = "hi <|im_start|>" * (LONG_TEXT // 15 + 1)
    assert watched.encode(text) == tokenizer._tokenizer.encode(text).ids == tokenizer.encode("hi <|im_start|>") * (LONG_TEXT // 15 + 1)
    assert watched.encode("hi") == tokenizer.encode("hi")
    assert asked == ["encode_batch", "encode"]


def test_a_first_token_is_added_only_when_the_model_wants_it_and_only_where_asked() -> None:
    tokenizer = tiny(add_bos=True)
    assert tokenizer.encode("aa") == [1, 260]
    assert tokenizer.encode("aa", add_special_tokens=False) == [260]
    assert tiny().encode("aa") == [260]


def test_special_tokens_are_left_out_of_text_unless_wanted() -> None:
    tokenizer = tiny()
    assert tokenizer.decode([1, 260, 2]) == "aa"
    assert tokenizer.decode([1, 260, 2], skip_special_tokens=False) == "<|im_start|>aa<|im_end|>"
    assert [tokenizer.is_special(i) for i in (1, 260, 9999)] == [True, False, False]
    assert (tokenizer.vocab_size, tokenizer.token_bytes(259), tokenizer.token_bytes(9999)) == (261, b" a", b"")


@pytest.mark.parametrize("tokenizer", [tiny(), ByteTokenizer()], ids=["bpe", "bytes"])
@given(text=st.text())
def test_a_stream_never_shows_half_a_character_and_adds_up_to_the_text(tokenizer: HfTokenizer | ByteTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.stream()
    pieces = [stream.step(token_id) for token_id in ids]
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert stream.flush() == ""


@given(ids=st.lists(st.integers(0, 260)))
def test_a_stream_of_any_ids_adds_up_to_what_the_tokenizers_package_decodes(ids: list[int]) -> None:
    tokenizer = tiny()
    stream = tokenizer.stream()
    text = "".join([stream.step(token_id) for token_id in ids]) + stream.flush()
    assert text == tokenizer.decode(ids) == tokenizer._tokenizer.decode(ids, skip_special_tokens=True)


def test_a_stream_holds_bytes_back_until_their_character_is_whole() -> None:
    stream = ByteTokenizer().stream()
    assert [stream.step(byte) for byte in "é€a".encode()] == ["", "é", "", "", "€", "a"]
    assert [stream.step(byte) for byte in "€".encode()[:2]] == ["", ""]
    assert stream.flush() == "\ufffd"


def test_half_a_surrogate_pair_is_refused_as_text() -> None:
    for tokenizer in (tiny(), ByteTokenizer()):
        with pytest.raises(ModelError, match=r"half a surrogate pair at character 1"):
            tokenizer.encode("a\ud800")


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"tiny\.gguf: pre-tokenizer 'tekken' is not supported; supported are: gpt-2, smollm"):
        tiny(pre="tekken")


def sentencepiece(folder: Path) -> HfTokenizer:
    """As Llama 2 and TinyLlama have it: a space mark before every word, bytes for what has no token."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}, "▁": 259, "a": 260, "▁a": 261}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    found = read_tokenizer(folder)
    assert found is not None
    return found


def test_a_sentencepiece_style_tokenizer_streams_bytes_and_drops_the_first_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    ids = tokenizer.encode("a a é", add_special_tokens=False)
    assert ids == [261, 261, 259, 3 + 0xC3, 3 + 0xA9]
    stream = tokenizer.stream()
    assert [stream.step(token_id) for token_id in ids] == ["a", " a", " ", "", "é"]
    assert tokenizer.decode(ids) == "a a é"


def test_a_decoder_we_do_not_know_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"decoder WordPiece.* is not supported; supported are: ByteLevel, Metaspace, ByteFallback"):
        read_tokenizer(tmp_path)


def test_a_folder_gives_its_template_from_either_file_and_its_tokens_in_either_form(tmp_path: Path) -> None:
    tiny().save(tmp_path)
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "{{ bos_token }}{{ eos_token }}old"}
    write_json(tmp_path / "tokenizer_config.json", settings)
    assert _read(tmp_path).render_chat([]) == "<|im_start|><|im_end|>old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert _read(tmp_path).render_chat([]) == "new"
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    write_json(tmp_path / "tokenizer_config.json", {**settings, "chat_template": named})
    assert _read(tmp_path).render_chat([]) == "plain"
    assert _read(tmp_path).render_chat([], tools=[{}, {}]) == "tools 2"


def test_a_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer file"):
        read_tokenizer(tmp_path)
    tiny().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read as a JSON object"):
        read_tokenizer(tmp_path)


def _read(folder: Path) -> HfTokenizer:
    found = read_tokenizer(folder)
    assert found is not None
    return found


def render(template: str, **kwargs: Any) -> str:
    messages = [{"role": "user", "content": "<b>&'é"}]
    return tiny(chat_template=template).render_chat(messages, **kwargs)


def test_templates_have_the_helpers_that_transformers_gives_them() -> None:
    assert render("{{ messages[0] | tojson }}") == """{"role": "user", "content": "<b>&'é"}"""
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for m in messages %}{% generation %}{{ m['role'] }}{% endgeneration %}{% break %}{% endfor %}") == "user"
    assert render("  {% if add_generation_prompt %}\nyes\n  {% endif %}") == "yes\n"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{% if tools %}tools{% else %}none{% endif %}") == "none"


def test_what_a_template_objects_to_is_one_clear_error() -> None:
    with pytest.raises(ModelError, match=r"the chat template cannot render these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ModelError, match=r"cannot render these messages: Expected an expression"):
        render("{% for %}")
    with pytest.raises(ModelError, match=r"cannot render these messages: .*unsafe"):
        render("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ModelError, match=r"has no chat template; use /v1/completions"):
        tiny(chat_template=None).render_chat([])


def test_the_byte_tokenizer_is_one_id_a_byte_with_specials_after_them() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé<|im_end|>") == [97, 195, 169, 257]
    assert (tokenizer.vocab_size, tokenizer.is_special(257), tokenizer.decode([97, 257])) == (258, True, "a")
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def _add_tokenizer(writer: gguf.GGUFWriter, model: str = "gpt2") -> None:
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * 258)
    writer.add_token_merges(["Ġ a", "a a"])
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATE)


def test_a_gguf_tokenizer_survives_conversion(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", metadata=_add_tokenizer)
    original, converted = load(path).tokenizer, load(save_converted(path, tmp_path / "converted", "float32")).tokenizer
    messages = [{"role": "user", "content": "aa 1"}]
    for tokenizer in (original, converted):
        assert tokenizer is not None
        text = tokenizer.render_chat(messages)
        assert text == "<|im_start|>user\naa 1<|im_end|>\n"
        assert tokenizer.encode(text)[0] == 1
        assert tokenizer.decode(tokenizer.encode(text)) == "user\naa 1\n"
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_a_gguf_tokenizer_of_another_kind_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "spm.gguf", metadata=lambda writer: _add_tokenizer(writer, "llama"))
    with pytest.raises(ModelError, match=r"spm\.gguf: tokenizer model 'llama' is not supported; supported is: gpt2"):
        gguf_tokenizer(read_gguf(path))


def test_a_folder_with_a_tokenizer_hands_it_to_the_checkpoint(tmp_path: Path) -> None:
    folder = llama_copy(tmp_path)
    tiny().save(folder)
    loaded = load(folder)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("aa") == [260]
    alone = load_tokenizer(folder)
    assert alone is not None
    assert alone.encode("aa") == [260]
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
