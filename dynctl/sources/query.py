"""What a command wants from a source: a dry run's request, and a selection of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynctl.base.decode_errors import RequestError
from dynctl.base.errors import UsageProblem
from dynctl.documents.decisions import DecisionRow
from dynctl.documents.snapshot import DecisionLine
from dynctl.documents.workers import WorkerRow
from dynctl.wire.openai import (
    ChatRequest,
    CompletionRequest,
    parse_any_request,
)


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """Exactly one of ``messages``, ``prompt``, ``token_ids`` and ``body`` is set.

    ``body`` is a whole request as a client sends it, with tools, template arguments, ``nvext`` and
    all; what the command line sets beside it wins.
    ``pin_prefill`` and ``pin_decode`` are worker names or ids as typed. ``assignments`` are the
    ``key=value`` texts of ``--set``. ``model_path`` is a local tokenizer directory. ``lora`` is an
    adapter's name, ``cache_salt`` the tenant's secret of the same name in a request's body.
    ``in_session``: the request names a session, in a header (x-session-id); ``session_id`` is its
    id, where a frontend is to look it up. ``follow``: seconds
    for which a live fleet is followed at most, until the requests that began before are over.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    body: Mapping[str, Any] | None = field(default=None, repr=False)
    model: str | None = None
    model_path: str | None = None
    required: tuple[str, ...] = ()
    preferred: Mapping[str, float] = field(default_factory=dict)
    pin_prefill: str | None = None
    pin_decode: str | None = None
    assignments: tuple[str, ...] = ()
    lora: str | None = None
    cache_salt: str | None = field(default=None, repr=False)
    in_session: bool = False
    session_id: str | None = field(default=None, repr=False)
    follow: float = 0.0

    @property
    def wanted(self) -> str | None:
        """The model that the command line names, else the body's."""
        named = None if self.body is None else self.body.get("model")
        return self.model or (named if isinstance(named, str) else None)

    def request_body(self) -> dict[str, Any]:
        """The request as a client sends it, without the command line's pins and taints."""
        if self.body is not None:
            body = dict(self.body)
        elif self.messages is not None:
            body = {"messages": list(self.messages)}
        else:
            body = {"prompt": self.prompt if self.token_ids is None else list(self.token_ids)}
        if self.cache_salt is not None:
            body["cache_salt"] = self.cache_salt
            if isinstance(body.get("nvext"), dict):
                body["nvext"] = {k: v for k, v in body["nvext"].items() if k != "cache_salt"}
        return body

    def request(self, model: str) -> ChatRequest | CompletionRequest:
        """The request for ``model``, read as frontends read it; raises UsageProblem."""
        body = self.request_body() | {"model": model}
        try:
            return parse_any_request(body)
        except RequestError as error:
            raise UsageProblem(f"invalid request: {error}") from None


@dataclass(frozen=True, slots=True)
class DecisionQuery:
    """Which past decisions a command wants, at most ``limit`` of them.

    ``domain`` is a value (``zone-a``) or ``domain=value`` of a chosen worker; ``worker`` a worker's
    name. ``moved``: those that topology moved. ``response``: a state of the client's response.
    """

    limit: int = 50
    refused: bool = False
    moved: bool = False
    model: str | None = None
    domain: str | None = None
    worker: str | None = None
    response: str | None = None

    @property
    def parameters(self) -> dict[str, str | int]:
        """The query of ``GET /v1/decisions``, without the limit."""
        named = {"model": self.model, "domain": self.domain, "worker": self.worker}
        parameters: dict[str, str | int] = {k: v for k, v in named.items() if v is not None}
        outcome = "refused" if self.refused else self.response
        parameters |= {} if outcome is None else {"outcome": outcome}
        return parameters | ({"moved": 1} if self.moved else {})

    def shows_end(self, row: DecisionRow) -> bool:
        """Whether the end of a request is shown that was running when its decision was read: one
        that is wanted, or that is not as it should be."""
        return self.response is not None or row.response.state != "complete"

    def _keeps_response(self, line: DecisionLine) -> bool:
        if self.response == "refused":  # also where the source knows refusals only
            return line.refused
        return self.response in (None, line.response.state)

    def keeps(self, line: DecisionLine) -> bool:
        """Whether a decision matches, as far as its source reports it."""
        refs = [hop.worker for hop in (line.prefill, line.decode) if hop is not None]
        return (
            (not self.refused or line.refused)
            and self._keeps_response(line)
            and (not self.moved or bool(line.moved))
            and self.model in (None, line.model)
            and (self.worker is None or self.worker in refs)
            and (self.domain is None or _in_domain(line, self.domain))
        )


def _in_domain(line: DecisionLine, text: str) -> bool:
    name, separator, value = text.partition("=")
    return any(
        domains.get(name) == value if separator else name in domains.values()
        for domains in (line.domains, line.prefill_domains)
    )


def choose_model(wanted: str | None, models: Sequence[str], served: Sequence[str] = ()) -> str:
    """``wanted`` if it is served, else the only model there is; raises UsageProblem.

    ``served``: all names that requests may use, where aliases and adapters are known too.
    """
    known = ", ".join(sorted(served or models)) or "none"
    if wanted is not None:
        if wanted not in models and wanted not in served:
            raise UsageProblem(f"model {wanted}: no such model; served: {known}")
        return wanted
    if len(models) != 1:
        raise UsageProblem(
            f"{len(models)} models are served ({known}); name one with --model"
            if models
            else "no model is served: no worker is registered, or none has answered yet",
            ""
            if models
            else "dynctl workers list shows each worker and why it is unavailable; "
            "register one: dynctl serve frontend --worker URL",
        )
    return models[0]


_FIELDS = ("name", "role", "model", "status")


def selector_keys(rows: Sequence[WorkerRow]) -> list[str]:
    """The keys that a selector may use on ``rows``: fields, then topology domains."""
    return [*_FIELDS, *sorted({domain for row in rows for domain in row.domains})]


@dataclass(frozen=True, slots=True)
class Selector:
    """``-l zone=zone-a,role!=decode``: the workers of a list, as kubectl's label selectors.

    ``terms``: ``(key, value, wanted)``, all of which must hold; a missing domain equals no value.
    """

    terms: tuple[tuple[str, str, bool], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Raises UsageProblem naming the term."""
        terms = []
        for term in filter(None, (part.strip() for part in text.split(","))):
            key, separator, value = term.partition("=")
            excluded = key.endswith("!")
            key = key.rstrip("!").strip()
            if not separator or not key or not value.strip("= "):
                raise UsageProblem(
                    f"--selector {term}: expected KEY=VALUE or KEY!=VALUE",
                    "for example: -l zone=zone-a,role=decode",
                )
            terms.append((key, value.strip("= "), not excluded))
        return cls(tuple(terms))

    def unknown_keys(self, rows: Sequence[WorkerRow]) -> list[str]:
        """The keys that no worker of ``rows`` has."""
        known = selector_keys(rows)
        return list(dict.fromkeys(key for key, _, _ in self.terms if key not in known))

    def matches(self, row: WorkerRow) -> bool:
        return all((_value(row, key) == value) is wanted for key, value, wanted in self.terms)


def _value(row: WorkerRow, key: str) -> str | None:
    if key in row.domains:
        return row.domains[key]
    return str(getattr(row, key)) if key in _FIELDS else None
