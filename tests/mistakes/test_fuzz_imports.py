"""Changed, cut and random files reach every importer: a config that loads, or an error that names the file. Never a traceback."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from randomized import count_examples, run_examples
from wrong_inputs import NAMES, ROOT, SNIPPETS, VALUES, hold_to_the_rules, places

from swarmtrain import importers
from swarmtrain.config.load import parse
from swarmtrain.config.source import read_yaml
from swarmtrain.errors import SwarmtrainError

EXAMPLES = count_examples(fixed=300, seeded=4000)
FIXTURES = {path.name: path.read_text() for path in sorted((ROOT / "tests" / "unit" / "imports").iterdir()) if path.suffix != ".out"}
FORMATS = st.sampled_from([None, None, None, None, *importers.Format])
"""None: the format that the content shows."""


@st.composite
def cut(draw: st.DrawFn) -> bytes:
    """Return a fixture with some of its text replaced, inserted or removed."""
    text = draw(st.sampled_from([*FIXTURES.values()]))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.one_of(SNIPPETS, st.text(max_size=3), st.just(""))) + text[at + draw(st.integers(0, 30)) :]
    return text.encode(errors="surrogatepass")


@st.composite
def replaced(draw: st.DrawFn) -> bytes:
    """Return a fixture with some of its values replaced, renamed or removed."""
    values = copy.deepcopy(draw(st.sampled_from(MAPPINGS)))
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(list(places(values)) or [("x",)]))
        target: Any = values
        for key in above:
            target = target[key]
        how = draw(st.sampled_from(["replace", "replace", "rename", "remove"]))
        if isinstance(target, list) or how == "replace":
            target[last] = draw(VALUES)
        elif how == "rename":
            target[draw(NAMES)] = target.pop(last, None)
        else:
            target.pop(last, None)
    return yaml.dump(values, allow_unicode=draw(st.booleans())).encode(errors="surrogatepass")


MAPPINGS = [read_yaml(text).values for name, text in FIXTURES.items() if name.endswith((".yml", ".json"))]
FILES = st.one_of(cut(), cut(), replaced(), replaced(), st.binary(max_size=300))
"""Contents of files."""


class Feeding:
    """Passes files to the importers, and counts what comes out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: Counter[str] = Counter()

    def feed(self, content: bytes, form: importers.Format | None, hosts: bytes | None) -> None:
        path, hostsfile = self.folder / "theirs", self.folder / "hosts"
        path.write_bytes(content)
        hostsfile.write_bytes(hosts or b"")
        try:
            made = importers.load(path, form=form, hostsfile=None if hosts is None else hostsfile)
        except SwarmtrainError as error:
            self.outcomes["refused"] += 1
            hold_to_the_rules(error)
            self.check_place(error)
            return
        self.outcomes[made.format] += 1
        parse(made.yaml())
        assert json.loads(json.dumps(made.to_dict()))

    def check_place(self, error: SwarmtrainError) -> None:
        assert error.told[0][0].startswith((str(self.folder / "theirs"), str(self.folder / "hosts"))), error


def test_no_file_of_another_tool_gives_a_traceback(tmp_path: Path) -> None:
    feeding = Feeding(tmp_path)
    hosts = st.one_of(st.none(), st.none(), st.none(), cut(), st.sampled_from([b"gpu-1 slots=2\ngpu-2\n"]))
    run_examples(feeding.feed, FILES, FORMATS, hosts, suite="fast", examples=EXAMPLES)
    print(f"{sum(feeding.outcomes.values())} files: " + ", ".join(f"{count} {outcome}" for outcome, count in feeding.outcomes.items()))
    assert feeding.outcomes["refused"] >= EXAMPLES // 10
    assert {*importers.Format} <= {*feeding.outcomes}
