"""Model interface for EleutherAI's lm-evaluation-harness, which evaluates a model on benchmark tasks. Requires the pip extra `tasks`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
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
from swarmtrain.trainer.inference.generation import SamplingParams, build_logits_gather, generate_tokens
from swarmtrain.trainer.inference.text_stream import TextStream
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.tokenize import tokenizer_backends
from swarmtrain.trainer.tokenize.chat_template import ChatTemplate
from swarmtrain.trainer.tokenize.document_builders import AddedTokens
from swarmtrain.trainer.tokenize.tokenizer_backends import BaseTokenizer

_DEFAULT_MAX_TOKENS = 256
"""Maximum number of generated tokens for a task that sets no limit."""
TokenizedRequest = tuple[tuple[str, str], list[int], list[int]]
"""Texts of a context and its continuation, tokens of the context, and tokens of the continuation."""


class HarnessModel(TemplateLM):  # type: ignore[misc]  # TemplateLM is not typed
    """Computes log-likelihoods and completions for the harness, with a model sharded over all ranks.

    All ranks must make the same calls in the same order.
    """

    def __init__(
        self,
        model: ParallelModel,
        tokenizer: BaseTokenizer,
        batch_size: int,
        *,
        stop_tokens: Collection[int] = (),
        begin_tokens: Sequence[int] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        """`batch_size`: sequences per batch. `stop_tokens`: tokens that end a completion, like the tokenizer's EOS token.

        `begin_tokens`: tokens with which each text begins. `template`: the chat template, if questions are conversations.

        The model's architecture must mask attention across documents.
        """
        super().__init__()
        self._model, self._tokenizer, self._batch_limit = model.local_model, tokenizer, batch_size
        self._gather_logits = build_logits_gather(model.mesh.tensor_group)
        self._eos_tokens = {
            token for token in tokenizer_backends.find_eos_token_ids(tokenizer) if token < model.local_model.architecture.vocab_size
        }
        self._stop_tokens = {*self._eos_tokens, *stop_tokens, *(template.end_of_turn_tokens if template else ())}
        self._template = template
        self._added_tokens = AddedTokens(tuple(begin_tokens))
        self._sequence_length = model.local_model.architecture.sequence_length

    @property
    def eot_token_id(self) -> int:
        """Id of the EOS token; if the tokenizer has none, the first token of an encoded newline."""
        return next(iter(self._eos_tokens), self.tok_encode("\n", add_special_tokens=False)[0])

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text without a context: BOS, or else the EOS token."""
        return next(iter(self._added_tokens.begin), self.eot_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, under which the harness may store requests."""
        return self._tokenizer.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source text of the chat template; empty without one."""
        return self._template.source if self._template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation. Without `add_generation_prompt`, its last message is the beginning of the answer."""
        template = self._template or ChatTemplate(self._tokenizer)
        return template.render_prompt(chat_history, continue_last=not add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of `string`, after those with which a text begins, unless `add_special_tokens` is False."""
        (encoding,) = self._tokenizer.encode([string])
        tokens = encoding.tokens if add_special_tokens is False else self._added_tokens.add_to(encoding.tokens)[0]
        return [int(token) for token in tokens]

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: list[TokenizedRequest], **kwargs: Any) -> list[tuple[float, bool]]:
        scores: dict[int, tuple[float, bool]] = {}
        # Sequences of similar length are put into the same batch, since padding wastes compute.
        order = iter(sorted(range(len(requests)), key=lambda number: -len(requests[number][1]) - len(requests[number][2])))
        while numbers := list(islice(order, self._batch_limit)):
            pairs = [requests[number][1:] for number in numbers]
            rows = [(context + continuation)[-self._sequence_length - 1 :] for context, continuation in pairs]
            max_length = max(map(len, rows)) - 1
            tokens = torch.stack([pad(torch.tensor(row[:-1]), (0, max_length - len(row) + 1)) for row in rows])
            logits = self._gather_logits(self._model(tokens.to(next(self._model.parameters()).device))).float()
            for number, row, row_logits, (_, continuation) in zip(numbers, rows, logits, pairs, strict=True):
                count = min(len(continuation), len(row) - 1)
                log_probabilities = row_logits[len(row) - 1 - count : len(row) - 1].log_softmax(-1)
                target_tokens = torch.tensor(row[-count:], device=log_probabilities.device)
                log_likelihood = log_probabilities.gather(1, target_tokens[:, None]).double().sum()
                scores[number] = float(log_likelihood), bool((log_probabilities.argmax(-1) == target_tokens).all())
        return [scores[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each full text, computed in windows of the model's sequence length."""
        log_likelihoods = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._sequence_length, 1)
            pairs: list[TokenizedRequest] = [(("", ""), *make_disjoint_window(window)) for window in windows]
            log_likelihoods.append(sum(log_likelihood for log_likelihood, _ in self._loglikelihood_tokens(pairs)))
        return log_likelihoods

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the completion of each context, up to the first occurrence of any of its stop texts."""
        texts: list[str] = []
        for options, same_options in groupby(requests, key=lambda request: json.dumps(request.args[1], sort_keys=True)):
            contexts = (str(request.args[0]) for request in same_options)
            while batch := list(islice(contexts, self._batch_limit)):
                texts += self._generate_texts(batch, json.loads(options))
        return texts

    def _generate_texts(self, contexts: Sequence[str], generation_options: dict[str, Any]) -> Iterator[str]:
        stop_texts, max_tokens = (
            generation_options.get("until", []),
            min(generation_options.get("max_gen_toks", _DEFAULT_MAX_TOKENS), self._sequence_length - 1),
        )
        temperature = generation_options.get("temperature", 1.0) if generation_options.get("do_sample") else 0.0
        sampling_params = SamplingParams(temperature, generation_options.get("top_k", 0), generation_options.get("top_p", 1.0))
        prompts = [self.tok_encode(context)[max_tokens - self._sequence_length :] or [self.eot_token_id] for context in contexts]
        stop_texts = [stop_texts] if isinstance(stop_texts, str) else stop_texts
        streams = [TextStream(self._tokenizer, prompt, stop_texts) for prompt in prompts]
        tokens = generate_tokens(
            self._model,
            prompts,
            sampling_params,
            max_tokens=max_tokens,
            eos_tokens=self._stop_tokens,
            gather_logits=self._gather_logits,
            is_done=lambda number: streams[number].stopped,
        )
        for sampled in tokens:
            for stream, token in zip(streams, sampled, strict=True):
                if token is not None and not stream.stopped:
                    stream.add_token(token)
        return (stream.text for stream in streams)


def run_tasks(
    model: HarnessModel, tasks: Sequence[str], *, num_fewshot: int | None, limit: int | None, task_folder: Path | None
) -> dict[str, Any]:
    """Return the harness's results for `model` on `tasks`.

    `num_fewshot`: number of examples before each question; None: the task's default. `limit`: maximum number of questions per task.
    `task_folder`: folder with custom tasks. Raises TrainingError if a task does not exist, or if its data is not available.
    """
    # The harness calls git. Outside a repository, git's error message would hide the actual error.
    evaluator.get_git_commit_hash = lambda: None
    try:
        results = evaluator.simple_evaluate(
            model,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=_build_task_manager(tasks, task_folder),
            apply_chat_template=bool(model.chat_template()),
            log_samples=False,
            bootstrap_iters=1000,
        )
    except Exception as error:  # any error of the harness and its data libraries
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        hint = "run `lm_eval ls tasks` to list the tasks; data is downloaded when a task is first used"
        raise TrainingError(reason, place=f"--tasks {','.join(tasks)}", hint=hint) from error
    return dict(results or {})


def _build_task_manager(tasks: Sequence[str], task_folder: Path | None) -> TaskManager:
    """Return a task manager that can load `tasks`.

    Only `task_folder` is searched first, since scanning the harness's thousands of tasks takes 10 s.
    """
    local_manager = TaskManager(include_path=task_folder, include_defaults=False) if task_folder else None
    return local_manager if local_manager and set(tasks) <= set(local_manager.all_subtasks) else TaskManager(include_path=task_folder)


def format_results_table(results: dict[str, Any]) -> str:
    """Return `results` formatted as the harness's own table."""
    text: str = make_table(results)
    return text
