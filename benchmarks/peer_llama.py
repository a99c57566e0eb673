"""llama.cpp's own server as a peer, in this process: the same weights from a GGUF file whose tensors are all float32."""

import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from jaxkv.errors import JaxkvError
from jaxkv.extras import require_extra

Answers = list[list[int]]


class LlamaCpp:
    """Servers with a KV cache of so many cells for all slots together, one slot a request. A request that it ends early has fewer tokens.

    The binding is the package xllamacpp, whose ready-made wheel for Linux is built for AVX2; one that is built on the machine it runs on
    may be faster. Its cache is float16 as by default: half of what ours reads.
    """

    def __init__(self, gguf_path: Path, num_threads: int) -> None:
        self._module = require_extra("peers", "xllamacpp")
        self._num_threads = num_threads or os.cpu_count() or 1
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "float32.gguf"
        write_float32(gguf_path, self._path)
        self.errors: set[str] = set()

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def work(self, num_cells: int, num_slots: int, num_tokens: int) -> Callable[[Answers], Answers]:
        """A server that is ready, as a function from prompts to answers of so many tokens."""
        server = self._server(num_cells, num_slots)
        return lambda prompts: self._answer(server, prompts, num_tokens)

    def _server(self, num_cells: int, num_slots: int) -> Any:
        params = self._module.CommonParams()
        params.model.path = str(self._path)
        params.n_ctx, params.n_parallel, params.kv_unified = num_cells, num_slots, True
        params.cache_prompt, params.cache_ram_mib, params.cache_idle_slots = False, 0, False
        params.n_gpu_layers, params.fit_params, params.verbosity = 0, False, 1
        for cpu in (params.cpuparams, params.cpuparams_batch):
            cpu.n_threads = self._num_threads
        return self._module.Server(params)

    def _answer(self, server: Any, prompts: Answers, num_tokens: int) -> Answers:
        """All prompts at once, greedy."""
        answers: Answers = [[] for _ in prompts]

        def ask(i: int) -> None:
            body = {
                "prompt": prompts[i],
                "n_predict": num_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
            }
            try:
                answers[i] = _post(f"{server.listening_address}/completion", body)["tokens"]
            except HTTPError as error:
                self.errors.add(error.read().decode()[:200])

        asking = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        return answers


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    asked = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(asked) as answer:
        return dict(json.load(answer))


def write_float32(source: Path, target: Path) -> None:
    """Copy a GGUF file with every tensor as float32."""
    gguf = require_extra("peers", "gguf")
    if source.suffix != ".gguf":
        raise JaxkvError(f"llama.cpp is compared on a GGUF file, got {source.name}")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(name, field.contents(), *field.types[:2])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
