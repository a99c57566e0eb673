"""The GGUF format: metadata, tensor list, data. Knows no keys.

The header is read here, since gguf.GGUFReader takes 2.4 s for a 49k-word vocabulary and this 0.1 s; the block formats are the package's.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf.quants import dequantize, quant_shape_to_byte_shape

from jaxkv.models.errors import ModelError

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
ROWS_TOGETHER = 32  # of a tensor, for a row of the package's
VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies; `shape` is [out, in], as PyTorch writes it (the file lists it the other way round)."""

    path: Path
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int

    def read(self) -> np.ndarray:
        """The tensor's bytes, still quantised."""
        shape = quant_shape_to_byte_shape(self.shape, self.kind)
        with self.path.open("rb") as file:
            file.seek(self.start)
            raw = file.read(int(np.prod(shape)))
        return np.frombuffer(raw, np.uint8).reshape(shape)

    def dequantize(self, raw: np.ndarray) -> np.ndarray:
        """Float32 values [out, in].

        Blocks know nothing of rows, and the package works through 16 rows at a time, however short. So rows are joined first: SmolLM2 takes
        0.3 s of a processor instead of 0.5.
        """
        together = math.gcd(self.shape[0], ROWS_TOGETHER) if len(self.shape) == 2 else 1
        return (
            dequantize(raw.reshape(raw.shape[0] // together, -1), self.kind).reshape(self.shape)
            if together > 1
            else dequantize(raw, self.kind)
        )


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's metadata and where its tensors lie; no weights."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read everything but the data of a GGUF file."""
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except (OSError, struct.error, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise ModelError(f"{path} is not a whole GGUF file: {error}") from error


def _read(path: Path, file: BinaryIO) -> GgufFile:
    if file.read(4) != b"GGUF":
        raise ValueError("it does not start with the letters GGUF")
    version, num_tensors, num_keys = _scalar(file, "<I"), _scalar(file, "<Q"), _scalar(file, "<Q")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}, known are {VERSIONS}")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = _string(file)
        metadata[key] = _value(file, _scalar(file, "<I"))
    infos = [_tensor_info(file) for _ in range(num_tensors)]
    align = metadata.get("general.alignment", 32)
    base = -(-file.tell() // align) * align
    size = path.stat().st_size
    tensors = {name: GgufTensor(path, shape, kind, base + offset) for name, shape, kind, offset in infos}
    for name, tensor in tensors.items():
        end = tensor.start + int(np.prod(quant_shape_to_byte_shape(tensor.shape, tensor.kind)))
        if end > size:
            raise ValueError(f"tensor {name!r} ends at byte {end}, the file has {size} (is the download complete?)")
    return GgufFile(path, metadata, tensors)


def _tensor_info(file: BinaryIO) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
    name, num_dims = _string(file), _scalar(file, "<I")
    shape = tuple(_scalar(file, "<Q") for _ in range(num_dims))[::-1]
    return name, shape, gguf.GGMLQuantizationType(_scalar(file, "<I")), _scalar(file, "<Q")


def _scalar(file: BinaryIO, form: str) -> Any:
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _string(file: BinaryIO) -> str:
    length = _scalar(file, "<Q")
    return _bytes(file, length, "a string").decode("utf-8")


def _bytes(file: BinaryIO, length: int, what: str) -> bytes:
    """So many bytes; a damaged length is refused before memory is asked for it."""
    if length > os.fstat(file.fileno()).st_size - file.tell():
        raise ValueError(f"it ends inside {what}")
    return file.read(length)


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind != ARRAY:
        return _scalar(file, SCALARS[kind])
    item, length = _scalar(file, "<I"), _scalar(file, "<Q")
    if item in SCALARS:
        raw = _bytes(file, length * struct.calcsize(SCALARS[item]), "an array")
        return [value for (value,) in struct.iter_unpack(SCALARS[item], raw)]
    return _strings(file, length) if item == STRING else [_value(file, item) for _ in range(length)]


def _strings(file: BinaryIO, length: int) -> list[str]:
    """So many strings, from a map of the file: a vocabulary and its merges are some 100,000, too many for a few calls of `read` each."""
    found: list[str] = []
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at, size = file.tell(), len(data)
        for _ in range(length):
            start = at + LENGTH.size
            at = start + LENGTH.unpack_from(data, at)[0]
            if at > size:
                raise ValueError("it ends inside a string")
            found.append(data[start:at].decode("utf-8"))
    file.seek(at)
    return found
