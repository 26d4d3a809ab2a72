"""Randomized tests: the same examples in every run, or those of a seed.

`make test` runs a fixed set of examples. `make test-all` draws a seed, prints it and passes it in SWARMTRAIN_SEED: other examples. A test
that fails prints the command that runs the same examples again. SWARMTRAIN_EXAMPLES=N runs N examples of each randomized test.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SEED = int(os.environ["SWARMTRAIN_SEED"]) if os.environ.get("SWARMTRAIN_SEED") else None
Example = TypeVar("Example")


def count_examples(fixed: int, seeded: int | None = None) -> int:
    """Return how many examples a test runs: SWARMTRAIN_EXAMPLES if it is set, otherwise `seeded` with a seed and `fixed` without one."""
    return int(os.environ.get("SWARMTRAIN_EXAMPLES") or (fixed if SEED is None else seeded or fixed))


@contextmanager
def print_seed(suite: str) -> Iterator[None]:
    """Print how to repeat the examples of the block; an error gets it as a note, too."""
    chosen = f"SWARMTRAIN_EXAMPLES={examples} " if (examples := os.environ.get("SWARMTRAIN_EXAMPLES")) else ""
    repeat = f"make test SUITES={suite}" if SEED is None else f"SWARMTRAIN_SEED={SEED} make test-all SUITES={suite}"
    print(f"seed {'0 (fixed)' if SEED is None else SEED}; to repeat: {chosen}{repeat}")
    try:
        yield
    except BaseException as error:
        error.add_note(f"to repeat: {chosen}{repeat}")
        raise


def run_examples(check: Callable[..., None], *strategies: st.SearchStrategy[Any], suite: str, examples: int) -> None:
    """Call `check` with `examples` draws from the strategies. A failing example is printed, but not shrunk."""

    @settings(
        max_examples=examples,
        derandomize=SEED is None,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(*strategies))
    def run_example(drawn: tuple[Any, ...]) -> None:
        check(*drawn)

    with print_seed(suite):
        (run_example if SEED is None else seed(SEED)(run_example))()


def run_numbered(draw: Callable[[random.Random], Example], check: Callable[[Example], None], *, suite: str, numbers: range) -> None:
    """Call `check` with the independent draws with these `numbers`.

    Hypothesis mutates an example several times. If examples are expensive, independent draws cover more.
    """
    with print_seed(suite):
        for number in numbers:
            example = draw(random.Random(f"{SEED or 0}-{number}"))  # noqa: S311  # no secret
            try:
                check(example)
            except BaseException as error:
                error.add_note(f"example {number}: {example!r}")
                raise
