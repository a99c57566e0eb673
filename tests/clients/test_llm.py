"""The command `llm`: models of extra-openai-models.yaml, chats and completions, a conversation that goes on, a schema, tools, errors."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.weights]
MODELS = """
- model_id: here
  model_name: smollm2
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
- model_id: here-completion
  model_name: smollm2
  api_base: {url}/v1
  completion: true
- model_id: elsewhere
  model_name: another
  api_base: {url}/v1
"""
SHORT = ("-o", "temperature", "0", "-o", "max_tokens", "30")


@pytest.fixture
def llm(command, url, tmp_path):
    """Runs the command with some words; what it did."""
    found = command("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=url))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([found, *words], env=env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)

    return run


def test_a_chat_streams_and_goes_on_whole_and_tells_its_usage(llm):
    first = llm("-m", "here", "What is the capital of France?", *SHORT, "-u")
    assert (first.stdout, first.returncode) == ("The capital of France is Paris.\n", 0), first.stderr
    assert "37 input, 8 output" in first.stderr
    second = llm("-m", "here", "-c", "And of Italy?", *SHORT, "-u", "--no-stream")
    assert second.stdout == "The capital of Italy is Rome.\n", second.stderr
    assert "59 input, 8 output" in second.stderr
    logged = json.loads(llm("logs", "-n", "1", "--json").stdout)[0]
    assert logged["response_json"]["choices"][0]["finish_reason"] == "stop" and logged["output_tokens"] == 8


def test_a_completion_goes_on_with_its_prompt(llm):
    found = llm("-m", "here-completion", "The sea is", *SHORT)
    assert found.stdout.startswith(" a place of endless wonder and mystery."), found.stderr


def test_a_schema_gives_the_object_that_was_asked_for(llm):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"}, "age": {"type": "integer", "minimum": 0, "maximum": 20}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    found = llm("-m", "here", "Invent a dog", "--schema", json.dumps(schema), "-o", "temperature", "0", "-o", "max_tokens", "80")
    dog = json.loads(found.stdout)
    assert list(dog) == ["name", "age"] and dog["name"].isalpha() and 0 <= dog["age"] <= 20


def test_tools_and_every_option_of_a_chat_are_understood(llm):
    words = ("-T", "llm_version", "-s", "You are a pirate", "-o", "top_p", "0.9", "-o", "presence_penalty", "0.1", "-o", "seed", "3")
    found = llm("-m", "here", "Say hello", *words, "-o", "frequency_penalty", "0.1", "-o", "stop", "#", "-o", "max_tokens", "20")
    assert found.returncode == 0 and found.stdout.strip(), found.stderr


def test_eight_at_once_in_a_pool_for_three_say_what_each_says_alone(llm):
    options = ("-o", "max_tokens", "60", "--no-log")
    asked = [("-m", "here", f"Tell me about the number {i}", "-o", "seed", str(i), *options) for i in range(8)]
    alone = [llm(*words).stdout for words in asked]  # first: eight that make the command's database at once trip over each other
    with ThreadPoolExecutor(8) as pool:
        crowded = list(pool.map(lambda words: llm(*words), asked))
    assert [found.returncode for found in crowded] == [0] * 8, [found.stderr for found in crowded]
    assert [found.stdout for found in crowded] == alone and all(alone)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-m", "elsewhere", "Hello"), "another"),
        (("-m", "here", "word " * 600), "384"),
        (("-m", "here", "Hello", "-o", "logit_bias", '{"999999": 1}'), "logit_bias"),
    ],
)
def test_an_error_comes_through_in_the_servers_words(words, told, llm):
    found = llm(*words)
    assert found.returncode != 0 and told in found.stderr and "Traceback" not in found.stderr, found.stderr
