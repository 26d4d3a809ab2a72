"""A model under the tasks of EleutherAI's lm-evaluation-harness, through its own interface of models. Its package is the extra `tasks`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
from torch.nn.functional import pad

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.prepare import encoders
from swarmtrain.trainer.prepare.encoders import Encoder
from swarmtrain.trainer.use.generate import How, generate, of_all
from swarmtrain.trainer.use.text import Stream

_MOST = 256
"""Tokens that a task gets if it does not say how many it wants."""
Pair = tuple[tuple[str, str], list[int], list[int]]
"""A context and what goes on from it: as texts, and each as tokens."""


class Model(TemplateLM):  # type: ignore[misc]  # which is not typed
    """A model that this world's ranks share. All of them ask it the same, in the same order."""

    def __init__(self, model: ParallelModel, encoder: Encoder, batch: int) -> None:
        """`batch`: sequences at a time. The model's shape must tell documents apart."""
        super().__init__()
        self._model, self._encoder, self._batch = model.local, encoder, batch
        self._whole = of_all(model.mesh.tensor_group)
        self._ends = {token for token in encoders.ends(encoder) if token < model.local.shape.vocab_size}
        self._longest = model.local.shape.sequence_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; of a tokenizer without one that of a new line."""
        return next(iter(self._ends), self.tok_encode("\n")[0])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text: what it holds, as training data are prepared."""
        (found,) = self._encoder.encode([string], special=True)
        return [int(token) for token in found.tokens]

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: list[Pair], **kwargs: Any) -> list[tuple[float, bool]]:
        answers: dict[int, tuple[float, bool]] = {}
        # Sequences of about one length go together: what fills up the shorter ones is computed too.
        order = iter(sorted(range(len(requests)), key=lambda number: -len(requests[number][1]) - len(requests[number][2])))
        while numbers := list(islice(order, self._batch)):
            pairs = [requests[number][1:] for number in numbers]
            rows = [(context + following)[-self._longest - 1 :] for context, following in pairs]
            widest = max(map(len, rows)) - 1
            tokens = torch.stack([pad(torch.tensor(row[:-1]), (0, widest - len(row) + 1)) for row in rows])
            logits = self._whole(self._model(tokens.to(next(self._model.parameters()).device))).float()
            for number, row, seen, (_, following) in zip(numbers, rows, logits, pairs, strict=True):
                count = min(len(following), len(row) - 1)
                chances = seen[len(row) - 1 - count : len(row) - 1].log_softmax(-1)
                wanted = torch.tensor(row[-count:], device=chances.device)
                told = chances.gather(1, wanted[:, None]).double().sum()
                answers[number] = float(told), bool((chances.argmax(-1) == wanted).all())
        return [answers[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in pieces that are as long as the model can read."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._longest, 1)
            pairs: list[Pair] = [(("", ""), *make_disjoint_window(window)) for window in windows]
            found.append(sum(told for told, _ in self._loglikelihood_tokens(pairs)))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model makes of each context, until it says one of the texts at which it is to end."""
        texts: list[str] = []
        for options, alike in groupby(requests, key=lambda request: json.dumps(request.args[1], sort_keys=True)):
            contexts = (str(request.args[0]) for request in alike)
            while some := list(islice(contexts, self._batch)):
                texts += self._generated(some, json.loads(options))
        return texts

    def _generated(self, contexts: Sequence[str], options: dict[str, Any]) -> Iterator[str]:
        until, most = options.get("until", []), min(options.get("max_gen_toks", _MOST), self._longest - 1)
        temperature = options.get("temperature", 1.0) if options.get("do_sample") else 0.0
        how = How(temperature, options.get("top_k", 0), options.get("top_p", 1.0))
        prompts = [self.tok_encode(context)[most - self._longest :] or [self.eot_token_id] for context in contexts]
        streams = [Stream(self._encoder, [until] if isinstance(until, str) else until) for _ in prompts]
        tokens = generate(
            self._model, prompts, how, most=most, ends=self._ends, whole=self._whole, done=lambda number: streams[number].stopped
        )
        for drawn in tokens:
            for stream, token in zip(streams, drawn, strict=True):
                if token is not None and not stream.stopped:
                    stream.add(token)
        return (stream.text for stream in streams)


def results(model: Model, tasks: Sequence[str], *, shots: int | None, limit: int | None, folder: Path | None) -> dict[str, Any]:
    """Return what the harness says of `model` under `tasks`. Raises TrainingError if there is none of a name, or its data are not here.

    `shots`: examples before each question; None: as many as the task says. `limit`: questions of each. `folder` has tasks of one's own.
    """
    # It asks git, whose complaint about a folder that is no repository would be all that a person sees.
    evaluator.get_git_commit_hash = lambda: None
    try:
        found = evaluator.simple_evaluate(
            model,
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            task_manager=_manager(tasks, folder),
            log_samples=False,
            bootstrap_iters=1000,
        )
    except Exception as error:  # whatever the harness raises, and what it reads data with
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        hint = "lm_eval ls tasks lists what there is; data are fetched when a task is first used"
        raise TrainingError(why, place=f"--tasks {','.join(tasks)}", hint=hint) from error
    return dict(found or {})


def _manager(tasks: Sequence[str], folder: Path | None) -> TaskManager:
    """Return what knows `tasks`. To look through the harness's own thousands takes ten seconds, so those in `folder` alone come first."""
    own = TaskManager(include_path=folder, include_defaults=False) if folder else None
    return own if own and set(tasks) <= set(own.all_subtasks) else TaskManager(include_path=folder)


def table(found: dict[str, Any]) -> str:
    """Return results as the harness itself shows them."""
    shown: str = make_table(found)
    return shown
