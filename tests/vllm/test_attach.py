"""A real vLLM behind a real Dynamo frontend, through `dynctl serve attach`."""

from collections.abc import Iterator

import pytest

from tests.vllm import every_engine
from tests.vllm.joined import Joined, joined_engine
from tests.vllm.stack import Stack


@pytest.fixture(scope="module")
def joined() -> Iterator[Joined]:
    with Stack() as stack, joined_engine(stack) as made:
        yield made


test_a_dynamo_frontend_serves_the_tokens_of_vllm = (
    every_engine.a_dynamo_frontend_serves_the_tokens_of_the_engine
)


test_cached_prefixes_are_known_to_the_frontend_and_reused = (
    every_engine.cached_prefixes_are_known_to_the_frontend_and_reused
)


test_a_killed_sidecar_comes_back_with_the_cache_of_the_engine = (
    every_engine.a_killed_sidecar_comes_back_with_the_cache_of_the_engine
)


test_accepted_requests_end_whole_in_a_drain = every_engine.accepted_requests_end_whole_in_a_drain
