"""Reads a file that a client sends as multipart/form-data into a store, piece by piece. Knows nothing of what is in it."""

from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from jaxkv.errors import RequestError
from jaxkv.openai.values import shown
from jaxkv.serve import errors
from jaxkv.serve.files import MIB, FileStore, StoredFile
from jaxkv.serve.gate import FORM_BYTES
from jaxkv.serve.service import Service

FIELDS = ("file", "purpose")
PURPOSE = "batch"
_PIECE_BYTES = MIB
_GZIP_MAGIC = b"\x1f\x8b"


async def receive_file(request: Request, store: FileStore, service: Service, max_mib: int) -> StoredFile:
    """The file that a request holds; raises ApiError or RequestError for one that cannot be kept."""
    length = request.headers.get("content-length", "")
    most = max_mib * MIB + FORM_BYTES
    with store.arriving(min(int(length), most) if length.isdigit() else most) as (file_id, draft):
        form = await _read_form(request, most, max_mib)
        try:
            file = _check(form)
            if (file.size or 0) > max_mib * MIB:
                raise errors.too_large(max_mib, "server.max_file_mib")
            await _copy(file.file, draft, service)
        finally:
            await form.close()
        return store.add(file_id, _name(file.filename), PURPOSE)


async def _read_form(request: Request, most: int, max_mib: int) -> FormData:
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise RequestError("file: send it as multipart/form-data, with a field purpose that says batch", "file")

    async def limited() -> AsyncGenerator[bytes, None]:
        length = 0
        async for part in request.stream():
            length += len(part)
            if length > most:
                raise errors.too_large(max_mib, "server.max_file_mib")
            yield part

    try:
        return await MultiPartParser(request.headers, limited(), max_files=1, max_fields=8, max_part_size=1024).parse()
    except (MultiPartException, FormParserError) as error:
        raise RequestError(f"the body is no form that can be read: {error}", "file") from None
    except UnicodeError:  # of a charset that is none for names
        raise RequestError("the body is no form that can be read: its names are not in the charset that it says", "file") from None


def _check(form: FormData) -> UploadFile:
    """The file of a form that is as it should be."""
    for name in form:
        if name not in FIELDS:
            raise RequestError(f"{name[:40]}: is not supported here, allowed: {' and '.join(FIELDS)}; leave it out", name[:40])
    if form.get("purpose") != PURPOSE:
        got = form.get("purpose")
        raise RequestError(f"purpose: got {shown(got if isinstance(got, str) else None)}, allowed: {PURPOSE}", "purpose")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise RequestError("file: is missing, or has no filename", "file")
    start = file.file.read(2)
    file.file.seek(0)
    if not start:
        raise RequestError("file: is empty; a batch has at least one line", "file")
    if start == _GZIP_MAGIC:
        raise RequestError("file: is compressed; send its lines as they are", "file")
    return file


async def _copy(source: BinaryIO, draft: Path, service: Service) -> None:
    """Beside the event loop, in pieces, so that no request waits long for the same thread."""
    with closing(await service.work(lambda: draft.open("xb"))) as target:
        while data := await service.work(lambda: source.read(_PIECE_BYTES)):
            await service.work(lambda piece=data: target.write(piece))  # type: ignore[misc]


def _name(given: str | None) -> str:
    """What the client calls it, without folders; only ever shown."""
    return errors.spelled((given or "").replace("\\", "/").rpartition("/")[2][:255]) or "file.jsonl"
