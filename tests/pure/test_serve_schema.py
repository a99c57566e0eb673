"""/openapi.json describes every route, and every field that a body may have."""

import asyncio

from jaxkv.openai import Endpoint
from jaxkv.openai.fields import readers
from jaxkv.openai.tools import TOOL_FIELDS
from tests.serving import client


def described():
    async def go():
        async with client() as http:
            return (await http.get("/openapi.json")).json()

    return asyncio.run(go())


def body(document, path):
    (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
    return content["schema"]


def test_every_route_that_takes_a_body_says_what_is_in_it():
    document = described()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/files", "/v1/batches", "/health", "/sleep"} <= set(
        document["paths"]
    )
    paths = [path for path, methods in document["paths"].items() if "requestBody" in methods.get("post", {})]
    assert len(paths) == 6 and all(body(document, path)["properties"] for path in paths)
    assert "multipart/form-data" in document["paths"]["/v1/files"]["post"]["requestBody"]["content"]


def test_every_field_that_is_read_is_described():
    document = described()
    for endpoint, own in ((Endpoint.CHAT, {"messages", "top_logprobs", *TOOL_FIELDS}), (Endpoint.COMPLETION, {"prompt"})):
        schema = body(document, endpoint.value)
        assert set(readers(10)) | own | {"stream", "stream_options", "timeout_s", "logprobs"} <= set(schema["properties"])
        assert schema["properties"]["model"] == {"enum": ["small", None]}
        assert schema["required"] == ["messages" if endpoint is Endpoint.CHAT else "prompt"]


def test_what_stands_after_the_question_mark_is_described():
    document = described()
    named = {parameter["name"] for parameter in document["paths"]["/v1/files"]["get"]["parameters"]}
    assert named == {"limit", "after", "purpose", "order"}
    (action,) = [one for one in document["paths"]["/slots/{slot_id}"]["post"]["parameters"] if one["in"] == "query"]
    assert action["schema"]["enum"] == ["park", "restore", "cancel"]
