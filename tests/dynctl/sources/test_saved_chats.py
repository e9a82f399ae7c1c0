"""How chats are read belongs to a view: a live Dynamo's, saved, gives the same tokens again."""

from __future__ import annotations

from dynctl.documents.view import SavedView
from dynctl.sources.demo.fleet import DemoSource
from dynctl.sources.dry_run import DryRun
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource, open_view_bytes
from dynctl.tokenization import DEMO_MODEL_DIR, as_dynamo_reads, load_tokenizer

# Dynamo drops a reasoning that the template does not read, and folds it into the text instead.
CHAT = [
    {"role": "user", "content": "Why there?"},
    {"role": "assistant", "content": "Because.", "reasoning_content": "the cache is there"},
    {"role": "user", "content": "And now?"},
]


def as_if_of_a_dynamo() -> ViewSource:
    view = DemoSource().view
    made = SavedView(view.router, view.now, view.preset, view.model_paths, chats="dynamo")
    return ViewSource(made, "live")


def test_the_reading_of_chats_is_saved() -> None:
    query = RouteQuery(messages=CHAT)
    live = as_if_of_a_dynamo()
    again = open_view_bytes(live.save(), "FILE", "saved")
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    plain = tokenizer.encode_chat(CHAT)
    read = tokenizer.encode_chat(as_dynamo_reads(tokenizer, CHAT).messages)
    assert read != plain, "else this test could not fail"
    assert DryRun(live.view, query).tokens == read
    assert DryRun(again.view, query).tokens == read
    assert DryRun(DemoSource().view, query).tokens == plain
