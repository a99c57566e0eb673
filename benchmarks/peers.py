"""The same prompts and the same float32 weights through this engine, Hugging Face transformers and llama.cpp, on the same processors.

What to expect. All must read the same weights in every step and do the same products, so the ceiling is the same for all. One peer is
transformers' own continuous batching, `generate_batch`, in an ample cache, in one that holds half of the demand, and in that one with
`cpu_offload_space`, which keeps what does not fit in host memory; without it, a request that does not fit is computed again later. We run
in the same two pools. The job is the configuration's `workload`, all of it at once, with answers of one length; sharing of prefixes is off
and every answer is greedy.

The other peer is llama.cpp's server, one slot a request and one cache for all slots, in the same two sizes. It ends what does not fit.

Three figures: tokens/s, prompts included, how many answers came to their end, and how many equal the same request's own when nobody runs
beside it. What a call of `generate_batch` takes for its threads and cache, whatever the number of tokens, is measured by itself, and the
ratio is given without.
Where `generate_batch` does not run on this machine, the static batch of `generate` is measured in its place, and named so.

Needs the extra `peers`: pip install 'jaxkv[peers]'
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from ceilings import parameters
from common import Setup, endless, run, say, settle, summary, text, timed, turns
from peer_llama import LlamaCpp

from jaxkv.config import Config
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.extras import require_extra
from jaxkv.fetch import cache_folder, resolve_model_path
from jaxkv.models.load_hf_names import tensor_names
from jaxkv.summary import pressure_numbers
from jaxkv.workload.bodies import make_calls
from jaxkv.workload.draw import draw

OPTIONS: dict[str, Any] = {
    "offload_gib": 2.0,
    "page_size": 16,  # of transformers' cache
    "llama_threads": 0,  # 0: as many as there are processors
}
Answers = list[list[int]]
Work = Callable[[Answers], Answers]  # prompts in, answers out
AMPLE, TIGHT, OFFLOAD, STATIC = "ample", "tight", "tight_offload", "static_batch"


@dataclass(frozen=True, slots=True)
class Job:
    """What all are asked: so many tokens of answer for each prompt of the workload."""

    lengths: list[int]  # of the prompts, in tokens
    answer: int
    demand: int  # cells in whole pages, if all run at once

    def prompts(self, config: Config, vocab_size: int) -> Answers:
        """As token ids."""
        return [call.body["prompt"] for call in make_calls(config, vocab_size)]


def read_job(config: Config) -> Job:
    """The workload as something that every peer can be asked; ConfigError for one that is not."""
    requests, page = draw(config.workload, config.workload.seed), config.pool.page_size
    answers = sorted({request.answer_len for request in requests})
    if len(answers) > 1:
        raise ConfigError(
            f"workload: got answers of {answers[0]} to {answers[-1]} tokens, allowed here: one length for all, since transformers' "
            "generate_batch takes one; set workload.lengths to fixed, as configs/peers.yaml does"
        )
    if any(request.text is not None or request.n > 1 or request.is_cancelled for request in requests):
        raise ConfigError(
            "workload: got prompts from files, groups or cancels, allowed here: generated prompts with one answer each, which is waited for"
        )
    lengths = [request.prompt_len for request in requests]
    return Job(lengths, answers[0], sum(-(-(length + answers[0]) // page) * page for length in lengths))


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, by system and pool."""
    require_extra("peers", "transformers")
    require_extra("peers", "torch")
    require_extra("peers", "xllamacpp")
    o, job = setup.options, read_job(setup.config())
    rows, answer = setup.config().scheduler.rows, job.answer
    pools = {AMPLE: 2 * job.demand, TIGHT: job.demand // 2}
    fields = {name: {"pool.tokens": size, "model.dtype": "float32"} for name, size in pools.items()}
    with setup.engines(fields) as engines, ExitStack() as stack:
        prompts = job.prompts(setup.config(), engines[AMPLE].model_config.vocab_size)
        peer = Peer(engines[AMPLE], o, job)
        works: dict[tuple[str, str], Work] = {("jaxkv", name): _ours(engine, answer) for name, engine in engines.items()}
        works |= {("transformers", name): work for name, work in peer.works(pools).items()}
        for key, work in list(works.items()):
            if reason := _refusal(work, prompts):
                say(f"  {' '.join(key)} does not run here: {reason}")
                peer.refusals[key[1]] = reason
                del works[key]
        if ("transformers", AMPLE) not in works:
            works["transformers", STATIC] = peer.static
        config = setup.config()
        llama = stack.enter_context(LlamaCpp(resolve_model_path(config.model.path, cache_folder(config.run.cache_dir)), o.llama_threads))
        works |= {("llama.cpp", name): llama.work(size, rows, answer) for name, size in pools.items()}
        call_s = peer.call_s(pools[AMPLE], prompts[0])
        alone = {system: _alone(next(work for key, work in works.items() if key[0] == system), prompts) for system, _ in works}
        rates: dict[tuple[str, str], list[float]] = {key: [] for key in works}
        whole, equal = dict.fromkeys(works, 0), dict.fromkeys(works, 0)
        for round_ in range(setup.rounds):
            for key in turns(list(works), round_):
                answers: Answers = []
                seconds = timed(lambda key=key, answers=answers: answers.extend(works[key](prompts)))  # type: ignore[misc]
                rates[key].append(sum(map(len, answers)) / seconds)
                whole[key] += sum(len(a) == answer for a in answers)
                equal[key] += sum(a == b and len(a) == answer for a, b in zip(answers, alone[key[0]], strict=True))
                say(f"  round {round_ + 1}, {' '.join(key)}: {rates[key][-1]:.1f} tokens/s")
        speeds = {key: summary(values, digits=2) for key, values in rates.items()}
        parks = pressure_numbers(engines[TIGHT])["num_parks"]
    for key, speed in speeds.items():
        num = len(prompts) * setup.rounds
        say(f"{' '.join(key)}: {text(speed, 'tokens/s')}, {whole[key]} of {num} answers whole, {equal[key]} as when alone")
    ours, theirs = speeds["jaxkv", AMPLE]["median"], speeds.get(("transformers", AMPLE), speeds.get(("transformers", STATIC)))
    assert theirs is not None
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "answer_tokens": answer * len(prompts),
        "pool_tokens": pools,
        "tokens_per_s": {" ".join(key): speed for key, speed in speeds.items()},
        "whole": {" ".join(key): f"{num} of {len(prompts) * setup.rounds}" for key, num in whole.items()},
        "equal_to_alone": {" ".join(key): f"{num} of {len(prompts) * setup.rounds}" for key, num in equal.items()},
        "jaxkv_over_transformers": round(ours / theirs["median"], 2),
        "jaxkv_over_transformers_less_call": round(
            ours / (theirs["median"] / (1 - call_s * theirs["median"] / (len(prompts) * answer))), 2
        ),
        "jaxkv_over_llama_cpp": round(ours / speeds["llama.cpp", AMPLE]["median"], 2),
        "llama_cpp_errors": sorted(llama.errors),
        "transformers_call_s": round(call_s, 3),
        "tight_over_transformers": _over(speeds, TIGHT),
        "jaxkv_num_parks": parks,
        "does_not_run": peer.refusals,
        "same_first_tokens": sum(a[0] == b[0] for a, b in zip(alone["jaxkv"], alone["transformers"], strict=True)),
        "attention": peer.attention,
    }


def _over(speeds: dict[tuple[str, str], dict[str, float]], pool: str) -> float | None:
    """Ours over the best of theirs in the tight pool."""
    theirs = [speeds[key]["median"] for key in (("transformers", pool), ("transformers", OFFLOAD)) if key in speeds]
    return round(speeds["jaxkv", pool]["median"] / max(theirs), 2) if theirs else None


def _ours(engine: Engine, answer: int) -> Work:
    def work(prompts: Answers) -> Answers:
        found = [completion.token_ids for completion in engine.generate(prompts, endless(answer))]
        settle(engine)
        return found

    return work


def _alone(work: Work, prompts: Answers) -> Answers:
    """Each prompt's answer when nobody runs beside it."""
    return [work([prompt])[0] for prompt in prompts]


def _refusal(work: Work, prompts: Answers) -> str | None:
    """Why this does not run here, after trying it: also the run that warms it up."""
    try:
        work(prompts[:2])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Peer:
    """The same model in transformers, with the very same weights."""

    def __init__(self, engine: Engine, options: Any, job: Job) -> None:
        self._options, self._job = options, job
        self._transformers = require_extra("peers", "transformers")
        self._torch = require_extra("peers", "torch")
        self._transformers.logging.set_verbosity_error()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        self._model = self._build(engine)
        self.refusals: dict[str, str] = {}
        self.attention = str(self._model.config._attn_implementation)

    def works(self, pools: dict[str, int]) -> dict[str, Work]:
        """Continuous batching in each pool, and in the tight one with host memory for what does not fit."""
        return {
            AMPLE: self._continuous(pools[AMPLE], 0.0),
            TIGHT: self._continuous(pools[TIGHT], 0.0),
            OFFLOAD: self._continuous(pools[TIGHT], self._options.offload_gib),
        }

    def call_s(self, pool_tokens: int, prompt: list[int]) -> float:
        """What a call takes beside its tokens: starting and ending its threads and its cache. 0 where it does not run."""
        if AMPLE in self.refusals:
            return 0.0
        one_token = self._continuous(pool_tokens, 0.0, answer=1)
        return min(timed(lambda: one_token([prompt])) for _ in range(2))

    def static(self, prompts: Answers) -> Answers:
        """One batch of equal prompts from beginning to end, without paging."""
        if len(set(map(len, prompts))) > 1:
            raise JaxkvError(
                "generate_batch does not run here, and what stands in for it takes prompts of one length: set workload.lengths to fixed"
            )
        tokens = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            found = self._model.generate(
                tokens, generation_config=self._generation(self._job.answer), attention_mask=self._torch.ones_like(tokens)
            )
        return [row[len(prompts[0]) :].tolist() for row in found]

    def _continuous(self, pool_tokens: int, offload_gib: float, answer: int | None = None) -> Work:
        o, answer = self._options, answer or self._job.answer
        config = self._transformers.ContinuousBatchingConfig(
            page_size=o.page_size,
            num_blocks=pool_tokens // o.page_size,
            max_batch_tokens=max(256, *self._job.lengths),
            allow_block_sharing=False,
            cpu_offload_space=offload_gib,
            seed=0,
        )

        def work(prompts: Answers) -> Answers:
            found = self._model.generate_batch(
                prompts, generation_config=self._generation(answer), continuous_batching_config=config, progress_bar=False
            )
            answers = [list(output.generated_tokens) for output in found.values()]
            if len(answers) != len(prompts) or any(len(one) != answer for one in answers):
                errors = {str(output.error) for output in found.values() if output.error}
                raise JaxkvError(f"{len(answers)} of {len(prompts)} answers; {', '.join(errors) or 'no reason given'}")
            return answers

        return work

    def _generation(self, answer: int) -> Any:
        return self._transformers.GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True)

    def _build(self, engine: Engine) -> Any:
        """transformers' Llama, filled from our arrays: nothing is rounded on the way."""
        c = engine.model_config
        if c.model_type != "llama":
            raise JaxkvError(f"the comparison is written for llama models, got {c.model_type}")
        config = self._transformers.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_dim,
            intermediate_size=c.ffn_dim,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            max_position_embeddings=c.max_position,
            rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
            tie_word_embeddings=c.tie_embeddings,
            attn_implementation="sdpa",
        )
        model = self._transformers.LlamaForCausalLM(config).to(self._torch.float32).eval()
        model.load_state_dict(self._weights(engine), strict=not c.tie_embeddings)
        return model

    def _weights(self, engine: Engine) -> dict[str, Any]:
        """Our parameters under their Hugging Face names; kernels are [in, out] here and [out, in] there."""
        arrays, found = parameters(engine), {}
        for key, path in tensor_names(engine.model_config).items():
            array = np.array(arrays[path])
            found[key] = self._torch.from_numpy(np.ascontiguousarray(array.T if path.endswith("kernel") else array))
        return found


if __name__ == "__main__":
    run(__doc__, measure, rounds=2, options=OPTIONS)
