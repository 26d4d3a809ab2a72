"""Comparison of two runs: their losses over steps and over tokens, and the config keys and other facts that differ."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from swarmtrain.config import Config
from swarmtrain.errors import ComparisonError, SwarmtrainError
from swarmtrain.view.dashboard.data_source import RunDataSource
from swarmtrain.view.dashboard.page_data import PageData
from swarmtrain.view.deploy_diff import iterate_changed_keys

_COMPARED_CURVES = ("loss", "validation")
_RUN_FIELDS = ("run", "state", "started", "ended", "outcome", "progress", "validation", "world", "connection_error")
_PLACE = "comparison"
_HINT = "name two different runs: swarmtrain report RUN RUN, or choose them on the page of the cluster"


def check_run_count(names: Sequence[str]) -> None:
    """Raise ComparisonError unless there are two `names` of runs."""
    if len(names) != 2:
        named = f": {', '.join(names)}" if names else ""
        raise ComparisonError(f"needs two runs, but got {len(names)}{named}", place=_PLACE, hint=_HINT)


def load_comparison(sources: Sequence[RunDataSource]) -> PageData:
    """Return the comparison of the runs of `sources`. Raises ComparisonError unless they are two different runs with a loss curve.

    If a config cannot be read, the comparison contains the reason instead of the differences. Raises the errors of the data sources.
    """
    check_run_count([source.run for source in sources])
    first, second = sources
    if first.run_id == second.run_id:
        raise ComparisonError(f"both runs are the same one: {first.run}, id {first.run_id}", place=_PLACE, hint=_HINT)
    pages = [source.get_page_data() for source in sources]
    for source, page_data in zip(sources, pages, strict=True):
        if not any(name in page_data["curves"] for name in _COMPARED_CURVES):
            raise ComparisonError(
                "has no loss curve: it has not reported a loss so far", place=f"run {source.run}", hint=f"swarmtrain status {source.run}"
            )
    configs: tuple[Config, Config] | None = None
    note = ""
    try:
        configs = first.load_config(), second.load_config()
    except SwarmtrainError as error:
        note = str(error)
    names = [source.run if first.run != second.run else source.run_id for source in sources]
    return build_comparison(names, pages, configs, note)


def build_comparison(names: Sequence[str], pages: Sequence[PageData], configs: tuple[Config, Config] | None, config_note: str) -> PageData:
    """Return the comparison of two runs with different `names`, from their page data and configs.

    The curves are named 0.loss, 1.validation and so on. The horizontal axis `tokens` is missing if a run does not report its tokens.
    """
    curves = {
        f"{number}.{name}": page_data["curves"][name]
        for number, page_data in enumerate(pages)
        for name in _COMPARED_CURVES
        if name in page_data["curves"]
    }
    axes = {"steps": curves}
    without_tokens = [name for name, page_data in zip(names, pages, strict=True) if not page_data["token_rates"]]
    if not without_tokens:
        axes["tokens"] = {
            name: {**curve, "steps": [count_tokens(step, pages[int(name[0])]["token_rates"]) for step in curve["steps"]]}
            for name, curve in curves.items()
        }
    return {
        "runs": [
            {
                **{field: page_data.get(field) for field in _RUN_FIELDS},
                "name": name,
                "lowest_validation_loss": _find_lowest_validation_loss(page_data),
            }
            for name, page_data in zip(names, pages, strict=True)
        ],
        "axes": axes,
        "without_tokens": without_tokens,
        "config": None if configs is None else [_build_row(key, old, new) for key, old, new in iterate_changed_keys(*configs)],
        "config_note": config_note,
        "facts": list(_iterate_different_facts(pages)),
    }


def count_tokens(step: int, rates: Sequence[Sequence[int]]) -> int:
    """Return the tokens of the first `step` steps. `rates`: see collect_token_rates. The first rate also applies to the steps before."""
    starts = [0, *(start for start, _ in rates[1:])]
    current = bisect_right(starts, step) - 1
    ends = [*starts[1 : current + 1], step]
    return sum(rate * (end - start) for (_, rate), start, end in zip(rates, starts, ends, strict=False))


def _find_lowest_validation_loss(page_data: PageData) -> float | None:
    values = page_data["curves"].get("validation", {}).get("values", ())
    return min((value for value in values if value is not None), default=None)


def _iterate_different_facts(pages: Sequence[PageData]) -> Iterator[PageData]:
    """Yield the facts that the nodes of the runs reported and that differ, such as software versions and devices."""
    facts = [
        {fact["name"]: " | ".join(sorted(each["value"] for each in fact["values"])) for fact in page_data["node_facts"]}
        for page_data in pages
    ]
    for name in sorted({*facts[0], *facts[1]} - {"host", "ranks", "uuids"}):
        if facts[0].get(name) != facts[1].get(name):
            yield {"key": name, "values": [fact.get(name, "") for fact in facts]}


def _build_row(key: str, *values: Any) -> PageData:
    return {"key": key, "values": [json.dumps(value, ensure_ascii=False) for value in values]}
