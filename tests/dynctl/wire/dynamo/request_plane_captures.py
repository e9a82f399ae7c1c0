"""Exchanges with a real worker (tests/captures/dynamo-request-plane.origin.txt)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAPTURES = Path(__file__).parents[3] / "captures"


@dataclass(frozen=True)
class Exchange:
    codec: str
    body: Any
    request: bytes
    reply: bytes
    answer: bytes | None


def exchanges() -> dict[str, Exchange]:
    lines = (CAPTURES / "dynamo-request-plane.jsonl").read_text().splitlines()
    return {
        row["what"]: Exchange(
            row["codec"],
            row["body"],
            bytes.fromhex(row["request_hex"]),
            bytes.fromhex(row["reply_hex"]),
            None if row["answer_hex"] is None else bytes.fromhex(row["answer_hex"]),
        )
        for row in map(json.loads, lines)
    }
