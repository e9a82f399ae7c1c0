"""Query parameters, read as the real server's generated conversions read them."""

from collections.abc import Mapping

from tests.kube.api_server.status import bad_request

Query = Mapping[str, str]


def flag(query: Query, name: str) -> bool:
    """Everything but ``0`` and ``false``, in any case, is true; even nothing (``?watch``)."""
    return name in query and query[name].lower() not in ("0", "false")


def number(query: Query, name: str) -> int:
    """A count or a revision, 0 where it is absent or empty; raises 400."""
    text = query.get(name) or "0"
    if not text.isdecimal():
        raise bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax')
    return int(text)
