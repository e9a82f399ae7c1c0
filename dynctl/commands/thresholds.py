"""`dynctl thresholds get` and `thresholds set`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dynctl.options import GlobalOptions


def get_thresholds(
    options: GlobalOptions,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Only this model.", show_default=False)
    ] = None,
) -> int:
    """Show the busy thresholds in force, by model."""
    from dynctl.connect import connect
    from dynctl.connect.query import choose_model
    from dynctl.views.render import emit
    from dynctl.views.results import ModelThresholds, ThresholdList

    source = connect(options)
    found = source.thresholds()
    if model is not None:
        found = {choose_model(model, list(found)): found[model]}
    rows = [ModelThresholds(name, **_typed(values)) for name, values in sorted(found.items())]
    emit(ThresholdList(source.title, rows), options)
    return 0


def set_thresholds(
    options: GlobalOptions,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="May be left out where one model is served."),
    ] = None,
    decode_blocks: Annotated[
        str | None,
        typer.Option(
            "--active-decode-blocks",
            "--active-decode-blocks-threshold",
            metavar="0..1|none",
            help="Busy above this fraction of a rank's KV blocks.",
        ),
    ] = None,
    prefill_tokens: Annotated[
        str | None,
        typer.Option(
            "--active-prefill-tokens",
            "--active-prefill-tokens-threshold",
            metavar="N|none",
            help="Busy above this many active prefill tokens.",
        ),
    ] = None,
    prefill_frac: Annotated[
        str | None,
        typer.Option(
            "--active-prefill-tokens-frac",
            "--active-prefill-tokens-threshold-frac",
            metavar="X|none",
            help="Busy above this multiple of max_num_batched_tokens.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say which ranks would change; set nothing.")
    ] = False,
) -> int:
    """Set busy thresholds; what is left out stays, `none` switches one off.

    Shows before and after, and which ranks become busy or calm.
    """
    from dynctl.connect import connect
    from dynctl.connect.query import choose_model
    from dynctl.errors import UsageProblem
    from dynctl.views.render import emit
    from dynctl.views.results import ModelThresholds, ThresholdChange, rank_effects
    from router_core.config import SETTINGS
    from router_core.errors import ConfigError

    given = {
        "active_decode_blocks_threshold": ("--active-decode-blocks", decode_blocks),
        "active_prefill_tokens_threshold": ("--active-prefill-tokens", prefill_tokens),
        "active_prefill_tokens_threshold_frac": ("--active-prefill-tokens-frac", prefill_frac),
    }
    values: dict[str, float | int | None] = {}
    for name, (flag, text) in given.items():
        if text is None:
            continue
        try:
            values[name] = SETTINGS[name].parse(text)
        except ConfigError as error:
            raise UsageProblem(f"{flag}: {str(error).removeprefix(name + ': ')}") from None
    if not values:
        flags = ", ".join(flag for flag, _ in given.values())
        raise UsageProblem(
            f"no threshold was given; expected at least one of {flags}",
            "for example: dynctl thresholds set --active-decode-blocks 0.85 --dry-run",
        )
    source = connect(options)
    present = source.thresholds()
    chosen = choose_model(model, list(present))
    before = present[chosen]
    rows = [row for row in source.workers() if row.model == chosen]
    judged = [row for row in source.judged(chosen, values) if row.model == chosen]
    after = {**before, **values} if dry_run else source.set_thresholds(chosen, values)
    emit(
        ThresholdChange(
            source=source.title,
            before=ModelThresholds(chosen, **_typed(before)),
            after=ModelThresholds(chosen, **_typed(after)),
            applied=not dry_run,
            ranks=rank_effects(rows, judged),
        ),
        options,
    )
    return 0


def _typed(values: Mapping[str, float | int | None]) -> dict[str, Any]:
    return dict(values)
