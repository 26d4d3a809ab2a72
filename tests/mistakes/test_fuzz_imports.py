"""Changed, cut and random files reach every importer: a config that loads, or an error that names the file. Never a traceback."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from invalid_inputs import MAPPING_KEYS, ROOT, VALUES, YAML_SNIPPETS, check_error_format, iterate_paths
from randomized import count_examples, run_examples

from swarmtrain import importers
from swarmtrain.config.loader import parse_config
from swarmtrain.config.yaml_document import read_yaml
from swarmtrain.errors import SwarmtrainError

EXAMPLES = count_examples(fixed=300, seeded=4000)
FIXTURES = {path.name: path.read_text() for path in sorted((ROOT / "tests" / "unit" / "imports").iterdir()) if path.suffix != ".out"}
FORMATS = st.sampled_from([None, None, None, None, *importers.SourceFormat])
"""None: the format that the content shows."""


@st.composite
def mutated_texts(draw: st.DrawFn) -> bytes:
    """Return a fixture with some of its text replaced, inserted or removed."""
    text = draw(st.sampled_from([*FIXTURES.values()]))
    for _ in range(draw(st.integers(1, 3))):
        position = draw(st.integers(0, len(text)))
        text = (
            text[:position] + draw(st.one_of(YAML_SNIPPETS, st.text(max_size=3), st.just(""))) + text[position + draw(st.integers(0, 30)) :]
        )
    return text.encode(errors="surrogatepass")


@st.composite
def mutated_mappings(draw: st.DrawFn) -> bytes:
    """Return a fixture with some of its values replaced, renamed or removed."""
    values = copy.deepcopy(draw(st.sampled_from(MAPPINGS)))
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(list(iterate_paths(values)) or [("x",)]))
        target: Any = values
        for key in parents:
            target = target[key]
        change = draw(st.sampled_from(["replace", "replace", "rename", "remove"]))
        if isinstance(target, list) or change == "replace":
            target[last] = draw(VALUES)
        elif change == "rename":
            target[draw(MAPPING_KEYS)] = target.pop(last, None)
        else:
            target.pop(last, None)
    return yaml.dump(values, allow_unicode=draw(st.booleans())).encode(errors="surrogatepass")


MAPPINGS = [read_yaml(text).values for name, text in FIXTURES.items() if name.endswith((".yml", ".json"))]
FILES = st.one_of(mutated_texts(), mutated_texts(), mutated_mappings(), mutated_mappings(), st.binary(max_size=300))
"""Contents of files."""


class ImportFuzzer:
    """Passes files to the importers, and counts what comes out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: Counter[str] = Counter()

    def try_import(self, content: bytes, source_format: importers.SourceFormat | None, hosts: bytes | None) -> None:
        path, hostsfile = self.folder / "theirs", self.folder / "hosts"
        path.write_bytes(content)
        hostsfile.write_bytes(hosts or b"")
        try:
            imported = importers.import_config_file(path, source_format=source_format, hostsfile=None if hosts is None else hostsfile)
        except SwarmtrainError as error:
            self.outcomes["refused"] += 1
            check_error_format(error)
            self.check_error_place(error)
            return
        self.outcomes[imported.format] += 1
        parse_config(imported.to_yaml())
        assert json.loads(json.dumps(imported.to_dict()))

    def check_error_place(self, error: SwarmtrainError) -> None:
        assert error.messages_with_hints[0][0].startswith((str(self.folder / "theirs"), str(self.folder / "hosts"))), error


def test_no_file_of_another_tool_gives_a_traceback(tmp_path: Path) -> None:
    feeding = ImportFuzzer(tmp_path)
    hosts = st.one_of(st.none(), st.none(), st.none(), mutated_texts(), st.sampled_from([b"gpu-1 slots=2\ngpu-2\n"]))
    run_examples(feeding.try_import, FILES, FORMATS, hosts, suite="fast", examples=EXAMPLES)
    print(f"{sum(feeding.outcomes.values())} files: " + ", ".join(f"{count} {outcome}" for outcome, count in feeding.outcomes.items()))
    assert feeding.outcomes["refused"] >= EXAMPLES // 10
    assert {*importers.SourceFormat} <= {*feeding.outcomes}
