"""Keys of prompt pages: what makes them equal, what keeps them apart."""

from dataclasses import replace

from jaxkv.prefix import page_keys
from jaxkv.request import SamplingParams

PARAMS = SamplingParams()


def keys(
    prompt: list[int], params: SamplingParams = PARAMS, group_id: int = 0, *, fingerprint: str = "fp", is_cached: bool = True
) -> tuple[bytes, ...]:
    return page_keys(prompt, params, group_id, page_size=4, fingerprint=fingerprint, is_cached=is_cached)


def test_there_is_one_key_for_each_full_page_before_the_last_token() -> None:
    assert [len(keys(list(range(length)))) for length in (1, 4, 5, 8, 9, 12, 13)] == [0, 0, 1, 1, 2, 2, 3]


def test_a_key_stands_for_all_tokens_up_to_the_end_of_its_page() -> None:
    first, second = keys([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert keys([1, 2, 3, 4, 5, 6, 7, 8, 30, 31]) == (first, second)
    assert keys([1, 2, 3, 4, 5, 6, 7, 0, 9])[0] == first
    assert keys([1, 2, 3, 4, 5, 6, 7, 0, 9])[1] != second
    assert not set(keys([0, 2, 3, 4, 5, 6, 7, 8, 9])) & {first, second}
    assert first != second != keys([5, 6, 7, 8, 9])[0]


def test_what_bytes_depend_on_and_salts_keep_keys_apart_and_nothing_else_does() -> None:
    prompt = [1, 2, 3, 4, 5]
    found = [keys(prompt), keys(prompt, fingerprint="other"), keys(prompt, replace(PARAMS, cache_salt="a"))]
    assert len(set(found)) == 3
    assert keys(prompt, replace(PARAMS, seed=9, temperature=0.0, n=3, priority=4), group_id=7) == found[0]


def test_without_the_cache_only_the_choices_of_one_request_have_common_keys() -> None:
    prompt, two = [1, 2, 3, 4, 5], replace(PARAMS, n=2)
    assert keys(prompt, is_cached=False) == ()
    assert keys(prompt, two, 1, is_cached=False) == keys(prompt, two, 1, is_cached=False) != ()
    assert len({keys(prompt, two, 1, is_cached=False), keys(prompt, two, 2, is_cached=False), keys(prompt, two, 1)}) == 3
