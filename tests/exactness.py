"""What has to stay the same to the last bit, as checks that run on any backend: one engine or two in, an assertion out.

The rows of the table in docs/ARCHITECTURE.md ("what makes it exact") that an engine can show from outside: neighbours, row, placement,
park and restore in both modes, chunk cuts, delays, restarts.
"""

from dataclasses import replace
from typing import Any

import jax

from jaxkv.engine import Engine
from jaxkv.live import Handle
from jaxkv.request import Completion, SamplingParams
from jaxkv.scheduler import Scheduler
from tests.cpu import tiny

ROOMY = {"pool__tokens": 512}  # everybody fits: who parks here was told to
CHUNK = 8  # the tiny configuration's prefill chunk


def subjects() -> list[tuple[list[int], SamplingParams]]:
    """A greedy, a sampled and a penalised request; prompts below, across and at the edge of a chunk, one with its own logprobs."""
    common = {"max_tokens": 14, "ignore_eos": True, "logprobs": 3}
    return [
        (tiny.prompt(5), SamplingParams(temperature=0, **common)),
        (tiny.prompt(21), SamplingParams(temperature=0.8, seed=2**63 + 7, prompt_logprobs=3, **common)),
        (tiny.prompt(16), SamplingParams(temperature=0.8, seed=7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, **common)),
    ]


def crowd(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Neighbours that switch on every stage of the sampler between them, of lengths that differ with the seed."""
    wishes = [
        SamplingParams(max_tokens=30, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=25, temperature=1.3, seed=seed, top_p=0.7, ignore_eos=True, logprobs=5),
        SamplingParams(max_tokens=20, temperature=0.5, seed=seed, top_k=3, frequency_penalty=1.0, logit_bias={9: 5.0}, ignore_eos=True),
    ]
    return [(tiny.prompt(3 + (11 * (i + seed)) % 40, seed), wishes[i % 3]) for i in range(count)]


def answer(made: Engine, prompt: list[int], params: SamplingParams) -> tuple[Any, ...]:
    return tiny.content(tiny.run(made, [prompt], [params])[0])


def answers_alone(made: Engine) -> list[tuple[Any, ...]]:
    return [answer(made, prompt, params) for prompt, params in subjects()]


def finish(made: Engine, handle: Handle, neighbours: list[Handle]) -> Completion:
    """The subject's answer; its neighbours leave."""
    done = handle.result()
    for neighbour in neighbours:
        neighbour.cancel()
    tiny.settle(made)
    return done


def neighbours_and_row_change_nothing(made: Engine) -> None:
    """The subject comes after 0 to 3 others, so it sits in every row, and in pages that others held before."""
    expected = answers_alone(made)
    rows = set()
    for seed in range(2):
        for before in range(4):
            for (prompt, params), wanted in zip(subjects(), expected, strict=True):
                others = [made.submit(p, q) for p, q in crowd(before, seed)]
                handle = made.submit(prompt, params)
                later = [made.submit(p, q) for p, q in crowd(3 - before, seed + 7)]
                tiny.step_to(made, handle, 1)
                rows |= {view.row for view in made.scheduler.snapshot().sequences if view.seq_id == handle.seq_id}
                assert tiny.content(finish(made, handle, [*others, *later])) == wanted, (seed, before)
    assert len(rows - {None}) >= 3


def placement_changes_nothing(made: Engine) -> None:
    """The pool's pages are handed out in another order after every round."""
    expected = answers_alone(made)
    for seed in range(4):
        stirring = [made.submit(p, q) for p, q in crowd(4, seed)]
        for _ in range(6 + 3 * seed):
            made.step()
        for handle in stirring[::-1]:
            handle.cancel()
        tiny.settle(made)
        assert answers_alone(made) == expected, seed


def a_park_at_any_step_changes_nothing(made: Engine, every: int = 1) -> None:
    """Parked once before step k, prompt chunks included, beside a neighbour that goes on."""
    for prompt, params in subjects()[1:]:
        expected = answer(made, prompt, params)
        parked = 0
        last = -(-len(prompt) // CHUNK) + 13
        for k in range(1, last, every):
            (neighbour,) = (made.submit(p, q) for p, q in crowd(1, k))
            handle = made.submit(prompt, params)
            for _ in range(k):
                made.step()
            parked += made.scheduler.park(handle.seq_id) == ""
            done = finish(made, handle, [neighbour])
            assert tiny.content(done) == expected, k
        assert parked >= (last - 4) // every


def images_are_pinned_and_polls_do_not_wait(made: Engine) -> None:
    """What the start-up probe promised: the memory kind of a real image, and a poll that comes back before its copy."""
    parts = made.parts
    assert parts.host.why_blocking is None, parts.host.why_blocking
    handle = made.submit(tiny.prompt(40), SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
    tiny.step_to(made, handle, 2)
    assert made.scheduler.park(handle.seq_id) == ""
    while not tiny.image(made, handle.seq_id):
        made.step()
    held = tiny.image(made, handle.seq_id)
    kinds = {leaf.sharding.memory_kind for host in held for leaf in jax.tree.leaves(host.pages)}
    assert kinds == {"pinned_host"}
    handle.result()
    tiny.settle(made)
    assert parts.transfer.stats.memory_kinds == {"pinned_host"}


# Checks that start engines of their own


def many_parks_change_nothing(expected: list[tuple[Any, ...]], **fields: Any) -> None:
    """Parked again and again, all together, in the pool and with the copies that `fields` describe."""
    with tiny.engine(**fields) as made:
        prompts, params = (list(x) for x in zip(*subjects(), strict=True))
        found = list(map(tiny.content, tiny.run(made, prompts, params)))
        counters = made.scheduler.counters
        assert counters.num_parks == counters.num_restores > 0
        assert made.num_compiles_after_warmup == 0
    assert found == expected


def chunk_cuts_change_nothing(expected: list[tuple[Any, ...]], **fields: Any) -> None:
    """Every prompt cut at other places, all pieces padded to the compiled chunk width.

    The scheduler cuts by `prefill_chunk`, the programs are compiled for it too; here they differ: the width stays 8, the cuts are 3 or 5.
    """
    for cut in (3, 5):
        with tiny.engine(**fields) as made:
            made.scheduler = Scheduler(replace(made.scheduler.config, prefill_chunk=cut))
            assert answers_alone(made) == expected, cut


def a_restart_changes_nothing(**fields: Any) -> None:
    """Two engines with one fingerprint, one after the other."""
    seen = []
    for _ in range(2):
        with tiny.engine(**fields) as made:
            seen.append((made.system_fingerprint, answers_alone(made)))
    assert seen[0] == seen[1]
