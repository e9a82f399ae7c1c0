"""Our token ids are Dynamo's: every chat, through files fetched from the live card.

Dynamo returns the ids of a prompt in the answer to a dry run. Ours come from the tokenizer files
that the worker's card names, fetched as ``dynctl route`` fetches them.
"""

import asyncio
import json
import shutil

import pytest

from dynctl.adapters.dynamo.model_files import FetchedModel, fetch_model_files, host_of
from dynctl.tokenization import (
    ModelTokenizer,
    PromptError,
    as_dynamo_reads,
    encode_as_dynamo,
    load_tokenizer,
)
from dynctl.wire.dynamo.discovery import Instance, ModelCard, parse_entry
from tests.dynamo.chats import CHATS, PROMPTS, TWO_CALLS, WEATHER, Chat, user
from tests.dynamo.fleet import HERE, TINY_MODEL, DynamoFleet, WorkerPlan, aggregated

TEMPLATES = ("tiny", "tools_chatml", "headers", "parts", "parts_only", "thoughts")
KNOWN_DIFFERENT = {("parts_only", "reasoning before a call")}
"""There Dynamo hands the template a bare string, whose letters the template takes for parts."""


def model_with(template, directory):
    """The tiny model, with one of templates/ as chat_template.jinja."""
    shutil.copytree(TINY_MODEL, directory)
    if template != "tiny":
        path = directory / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        del settings["chat_template"]
        path.write_text(json.dumps(settings))
        shutil.copy(HERE / "templates" / f"{template}.jinja", directory / "chat_template.jinja")
    return directory


def live_card(fleet) -> tuple[ModelCard, str]:
    """The card of the fleet's only worker, and the host that it is served on."""
    [card] = entries(fleet, "mdc", ModelCard)
    [instance] = [
        each
        for each in entries(fleet, "instances", Instance)
        if each.endpoint == card.endpoint and each.instance_id == card.instance_id
    ]
    return card, host_of(instance)


def entries(fleet, bucket, kind):
    files = sorted((fleet.file_kv / "v1" / bucket).glob("[!.]*"))
    found = [parse_entry(f"v1/{bucket}/{file.name}", file.read_bytes()) for file in files]
    assert all(isinstance(each, kind) for each in found), found
    return found


class Live:
    """A fleet with one template, and our tokenizer made of what its card names."""

    def __init__(self, fleet: DynamoFleet, into) -> None:
        self.frontend = fleet.frontend
        self.card, host = live_card(fleet)
        self.fetched: FetchedModel = asyncio.run(fetch_model_files(self.card, host, into))
        self.tokenizer: ModelTokenizer = load_tokenizer(self.fetched.directory)

    def ours(self, chat: Chat) -> list[int]:
        return encode_as_dynamo(
            self.tokenizer, chat.messages, chat.tools, template_args=chat.template_kwargs
        )

    def dynamos(self, chat: Chat) -> list[int]:
        answer = self.frontend.dry_run(messages=chat.messages, **chat.fields())
        assert answer.ok, (chat.name, answer.body)
        return answer.token_ids


@pytest.fixture(scope="module", params=TEMPLATES)
def live(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("live")
    model = model_with(request.param, directory / "model")
    with DynamoFleet(aggregated(1), model_dir=model) as fleet:
        found = Live(fleet, directory / "cache")
        # The worker's copy is gone for us: only what was fetched can be at work.
        shutil.rmtree(model)
        yield found


@pytest.fixture
def template(request):
    return request.node.callspec.params["live"]


def test_at_least_fifty_chats():
    assert len(CHATS) >= 50
    assert len({chat.name for chat in CHATS}) == len(CHATS)


def test_chats_have_dynamos_token_ids(live, template, finding):
    different = {}
    chats = [chat for chat in CHATS if (template, chat.name) not in KNOWN_DIFFERENT]
    for chat in chats:
        ours, theirs = live.ours(chat), live.dynamos(chat)
        if ours != theirs:
            different[chat.name] = (
                live.tokenizer.decode(ours, False)[-600:],
                live.tokenizer.decode(theirs, False)[-600:],
            )
    equal = len(chats) - len(different)
    finding(f"token ids, template {template}: {equal} of {len(chats)} chats equal to Dynamo's")
    assert different == {}


def test_two_calls_at_once_are_equal_or_refused_by_both(live, template):
    if template != "headers":
        assert live.ours(TWO_CALLS) == live.dynamos(TWO_CALLS)
        return
    with pytest.raises(PromptError, match="one call at a time"):
        live.ours(TWO_CALLS)
    refused = live.frontend.dry_run(messages=TWO_CALLS.messages, **TWO_CALLS.fields())
    assert refused.status == 400


def test_tool_choice_and_generation_prompt(live):
    messages = [user("Weather?")]
    hidden = live.frontend.dry_run(messages=messages, tools=[WEATHER], tool_choice="none")
    read = as_dynamo_reads(live.tokenizer, messages, [WEATHER], tool_choice="none")
    assert live.tokenizer.encode_chat(read.messages, tools=read.tools) == hidden.token_ids

    unprompted = live.frontend.dry_run(messages=messages, add_generation_prompt=False)
    ours = live.tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert ours == unprompted.token_ids


@pytest.mark.parametrize("live", ["tiny"], indirect=True)
def test_plain_prompts_have_dynamos_token_ids(live):
    for prompt in PROMPTS:
        answer = live.frontend.dry_run(prompt)
        assert answer.ok, (prompt[:40], answer.body)
        assert live.tokenizer.encode_prompt(prompt) == answer.token_ids, prompt[:40]


def test_the_files_are_those_of_the_worker(live, template):
    names = {path.name for path in live.fetched.directory.iterdir()}
    expected = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == expected | ({"chat_template.jinja"} if template != "tiny" else set())
    assert live.fetched.requests == len(names)
    assert all(origin.startswith("http://127.0.0.1:") for origin in live.fetched.origins.values())


async def test_a_worker_that_serves_no_files_names_paths(tmp_path):
    """Without a system server a card has paths of the worker's disk, here ours too."""
    plan = WorkerPlan("worker-0", system_server=False)
    with DynamoFleet([plan]) as fleet:
        card, host = live_card(fleet)
        assert card.files["tokenizer"].path == str(TINY_MODEL / "tokenizer.json")
        fetched = await fetch_model_files(card, host, tmp_path / "cache")
        ours = load_tokenizer(fetched.directory).encode_chat([user("hello world")])
        assert fetched.requests == 0
        assert ours == fleet.frontend.dry_run(messages="hello world").token_ids
