"""The routing request of a selection's body: model, hashes, pins and allowed workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from aiohttp import web

from dynctl.base.decode_errors import RequestError
from dynctl.documents.selection import PinRef, SelectRequest, parse_select
from dynctl.serving.http.bodies import bodies_of
from dynctl.serving.http.json_responses import bad_request, read_json_object
from dynctl.serving.routing.refusal import HttpError, unknown_model
from dynctl.serving.routing.service import RoutingService
from dynctl.wire.large_body import LARGE
from dynctl.wire.nvext import policy_class_of
from router_core import HashingError, Pin, RoutingRequest, hash_prompt, sequence_hashes


class SelectionReader:
    """Reads selections for one service; every problem is an HttpError with the field."""

    def __init__(self, service: RoutingService, body_bytes: int) -> None:
        self._service = service
        self._body_bytes = body_bytes

    async def read(self, http: web.Request) -> tuple[SelectRequest, RoutingRequest]:
        """The body's selection, and its routing request."""
        body = await read_json_object(http, self._body_bytes)
        large = (http.content_length or LARGE) >= LARGE
        apart = bodies_of(http).turns.of(http.remote or "") if large else None
        with naming_fields():
            if apart is None:
                selection = parse_select(body)
            else:
                selection = await apart(partial(parse_select, body))
        model = self._model(selection)
        size = self._service.served.block_size(model)
        complete = selection.isl_tokens // size
        given = len(selection.sequence_hashes or selection.local_hashes or ())
        if given > complete:
            raise bad_request(
                f"isl_tokens: {selection.isl_tokens} tokens have {complete} blocks of {size}, "
                f"got {given} hashes",
                param="isl_tokens",
                code="out_of_range",
            )
        eagle = self._service.served.is_eagle(model)
        work = partial(_hashes, selection, size, is_eagle=eagle)
        try:
            local, hashes = work() if apart is None else await apart(work)
        except HashingError as error:
            raise bad_request(str(error), param="token_ids") from None
        allowed = selection.allowed
        return selection, RoutingRequest(
            id=selection.request_id or self._service.new_id(),
            model=model,
            isl_tokens=selection.isl_tokens,
            block_size=size,
            sequence_hashes=hashes,
            local_hashes=local,
            constraints=selection.constraints,
            pin_prefill=self._pin(selection.pin_prefill),
            pin_decode=self._pin(selection.pin_decode),
            allowed_worker_ids=None
            if allowed is None
            else frozenset(self._worker(worker_id, "allowed_worker_ids") for worker_id in allowed),
            lora_name=selection.lora_name or None,
            served_name=self._served_name(selection),
            salted=bool(selection.cache_salt),
            is_eagle=eagle,
            session=self._service.preparation.session(selection.session_id),
            policy_class=selection.policy_class or policy_class_of(http.headers),
            priority=selection.priority,
            strict_priority=selection.strict_priority,
            arrived_at=self._service.clock(),
            chained=selection.sequence_hashes is None,
            streams=selection.stream,
        )

    def _model(self, selection: SelectRequest) -> str:
        models = self._service.models()
        if selection.model is None and len(models) == 1:
            return models[0]
        known = ", ".join(sorted(models)) or "none yet"
        if selection.model is None:
            raise bad_request(
                f"model: required, one of: {known}", param="model", code="missing_field"
            )
        base = self._service.served.base_model(selection.model)
        if base is None:
            unread = self._service.may_serve(selection.model)
            error = unknown_model(selection.model, models, unread, by="router")
            raise replace(error, code="unknown_model") if error.status == 404 else error
        return base

    def _served_name(self, selection: SelectRequest) -> str | None:
        """The alias or the adapter that the workers must serve."""
        service = self._service
        name = selection.model and service.served.served_name(selection.model)
        adapter = selection.lora_name
        return adapter if adapter and service.served.served_name(adapter) else name or None

    def _pin(self, pin: PinRef | None) -> Pin | None:
        if pin is None:
            return None
        worker_id = self._worker(pin.worker, pin.field)
        registered = self._service.router.registry.slot(worker_id, pin.dp_rank or 0)
        if pin.dp_rank is not None and registered is None:
            raise bad_request(
                f"{pin.field}.dp_rank: worker {pin.worker} has no rank {pin.dp_rank}",
                param=f"{pin.field}.dp_rank",
                code="unknown_worker",
            )
        return Pin(worker_id, pin.dp_rank)

    def _worker(self, worker: str | int, field: str) -> int:
        registry = self._service.router.registry
        registered = registry.get(worker) if isinstance(worker, int) else None
        if isinstance(worker, str):
            registered = self._service.membership.find(worker)
        if registered is None:
            known = ", ".join(
                f"{worker.name} ({worker.worker_id})" for worker in list(registry)[:8]
            )
            raise bad_request(
                f"{field}: no worker {worker!r} is registered; registered: {known or 'none'}",
                param=field,
                code="unknown_worker",
            )
        return registered.worker_id


@contextmanager
def naming_fields() -> Iterator[None]:
    """Turns RequestError into the HTTP error with the field."""
    try:
        yield
    except RequestError as error:
        raise field_error(error) from None


def field_error(error: RequestError) -> HttpError:
    """The HTTP error with the field."""
    return HttpError(
        error.status, str(error), "invalid_request_error", error.code, param=error.field
    )


def _hashes(
    selection: SelectRequest, size: int, *, is_eagle: bool
) -> tuple[Sequence[int], Sequence[int]]:
    """The prompt's local hashes (none where the body has sequence hashes) and sequence hashes."""
    if selection.sequence_hashes is not None:
        return (), selection.sequence_hashes
    if selection.local_hashes is not None:
        return selection.local_hashes, sequence_hashes(selection.local_hashes)
    hashes = hash_prompt(
        selection.token_ids or (),
        size,
        lora_name=selection.lora_name,
        cache_salt=selection.cache_salt,
        is_eagle=is_eagle,
    )
    return hashes.local, hashes.sequence
