"""The safetensors format: a length, a JSON header, raw little-endian data. Knows no tensor names.

Read here rather than with the safetensors package because that offers no bfloat16 to NumPy.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxkv.models.errors import ModelError

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies in which file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def read(self) -> np.ndarray:
        """The tensor in memory of its own, in the dtype of the file."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            raw = file.read(self.end - self.start)
        return np.frombuffer(raw, DTYPES[self.dtype]).reshape(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor's place in the file, by name."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError(f"its header claims {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _entry(path, name, info, 8 + length, size) for name, info in header.items()}
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}") from error


def _entry(path: Path, name: str, info: dict, base: int, size: int) -> Entry:
    start, end = info["data_offsets"]
    if base + end > size:
        raise ValueError(f"tensor {name!r} ends at byte {base + end}, the file has {size} (is the download complete?)")
    if info["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name!r} is stored as {info['dtype']}, which is not one of {', '.join(DTYPES)}")
    if (end - start) != np.prod(info["shape"], dtype=int) * np.dtype(DTYPES[info["dtype"]]).itemsize:
        raise ValueError(f"tensor {name!r} has {end - start} bytes, not those of shape {info['shape']}")
    return Entry(path, info["dtype"], tuple(info["shape"]), base + start, base + end)
