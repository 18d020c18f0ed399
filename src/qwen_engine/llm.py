"""`LLM`: the engine for scripts. Text or token ids in, `RequestOutput`s out."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.engine.core import EngineCore
from qwen_engine.errors import EngineDeadError, RequestError
from qwen_engine.frontend.input_processor import InputProcessor, Prompt, as_prompt_list
from qwen_engine.frontend.output_processor import RequestState
from qwen_engine.models.hub import resolve_model
from qwen_engine.outputs import RequestOutput
from qwen_engine.request import SamplingParams
from qwen_engine.tokenization.tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM:
    """A model ready to generate, in this process.

    Options are the fields of `EngineConfig`; unknown names raise UnknownOptionError. Use as a context manager, or call
    `close`, or let it go out of scope: each frees the device. Calls from several threads take turns.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self.config = EngineConfig.from_options({"model": model, **options})
        folder = resolve_model(self.config.model, with_weights=self.config.load_format != "dummy")
        model_config = ModelConfig.from_folder(folder)
        self._folder = folder
        self.tokenizer = None if self.config.skip_tokenizer_init else Tokenizer.from_folder(folder)
        self._core = EngineCore(self.config, folder, model_config)
        self._lock = threading.Lock()
        self._lock_owner: int | None = None
        self._live: dict[str, RequestState] = {}  # by sequence id
        self._left: deque[RequestState] = deque()  # nobody waits for these any more
        self._inputs = InputProcessor(self.config, model_config, self.tokenizer)
        weakref.finalize(self, self._core.close)

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The same from a ready `EngineConfig`."""
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt + output."""
        return self._core.max_model_len

    @property
    def core(self) -> EngineCore:
        """The engine underneath, to look at while no thread generates."""
        return self._core

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The checkpoint's own defaults (generation_config.json), with `overrides` on top."""
        return SamplingParams(**{**self._core.model_config.sampling_defaults, **overrides})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes every prompt; results are in the order of the prompts.

        sampling_params: one for all prompts, or one for each; None takes `default_sampling_params()`.
        Raises RequestError, before any work, if one of the requests cannot be served.
        """
        return self._run_all(as_prompt_list(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several. `sampling_params=None` generates up to the context limit."""
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
            raise RequestError("messages must be a list of messages, or of such lists, and not empty", "messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [
            self.apply_chat_template(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        if sampling_params is None:
            sampling_params = self.default_sampling_params(max_tokens=None)
        return self._run_all(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields a RequestOutput (everything so far) of each request that a step has moved, until all have ended.

        Outputs of several prompts interleave; `request_id` tells them apart, in the order of the prompts. Leaving the
        loop early aborts what still runs.
        """
        return self._outputs(self._states(as_prompt_list(prompts), sampling_params))

    def track(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> tuple[list[RequestState], Iterator[list[RequestState]]]:
        """For measurements: the live requests, and an iterator that runs them and, after each step, yields those moved.

        Unlike `stream` it copies nothing, and a step without output yields an empty list.
        """
        states = self._states(as_prompt_list(prompts), sampling_params)
        return states, self._steps(states, every_step=True)

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation, as `chat` computes them; `options` are `chat`'s keyword-only arguments.

        For `stream`: `llm.stream([llm.apply_chat_template(messages)], params)`.
        """
        return self._inputs.needs_tokenizer().apply_chat_template(messages, **options)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._inputs.needs_tokenizer().encode(text)

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as Transformers loads it, for scripts that write their prompts with it."""
        self._inputs.needs_tokenizer()
        from transformers import AutoTokenizer  # slow to import

        return AutoTokenizer.from_pretrained(str(self._folder), local_files_only=True)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        with self._engine() as core:
            core.reset_prefix_cache()

    def close(self) -> None:
        """Ends the engine and frees its memory; safe to call twice."""
        with self._engine() as core:
            core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        states = self._states(prompts, sampling_params)
        with tqdm(total=len(states), desc="generating", unit="req", disable=None if use_tqdm else True) as progress:
            for _ in self._steps(states):
                num_finished = sum(state.finished for state in states)
                if num_finished > progress.n:
                    num_tokens = sum(state.num_output_tokens for state in states)
                    rate = num_tokens / max(progress.format_dict["elapsed"], 1e-9)
                    progress.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
                    progress.update(num_finished - progress.n)
        return [state.output() for state in states]

    def _outputs(self, states: Sequence[RequestState]) -> Iterator[RequestOutput]:
        for moved in self._steps(states):
            with self._engine():  # no other thread may be half-way through a step
                outputs = [state.output() for state in moved]
            yield from outputs

    def _steps(self, states: Sequence[RequestState], *, every_step: bool = False) -> Iterator[list[RequestState]]:
        """Runs these requests to their end; after each step that moved some of them (or each step), yields those.

        Whoever steps the engine serves all live requests, so loops over several streams may be nested or threaded.
        """
        try:
            with self._engine() as core:
                for state in states:
                    for index, sequence_id in enumerate(state.spec.sequence_ids):
                        sequence = state.spec.sequence(index)
                        self._inputs.constrain(sequence)
                        core.add(sequence)
                        self._live[sequence_id] = state
            while True:
                with self._engine() as core:
                    if not (any(state.moved for state in states) or all(state.finished for state in states)):
                        self._step(core)
                    moved = [state for state in states if state.moved]
                    for state in moved:
                        state.moved = False
                failure = next((state.failure for state in states if state.failure is not None), None)
                if failure is not None:  # another thread was stepping when the engine died
                    raise EngineDeadError(failure)
                if not moved and all(state.finished for state in states):
                    return
                if moved or every_step:
                    yield moved
        finally:
            self._left.extend(states)
            # The garbage collector may close a stream inside a step of this very thread, which then sees to the rest.
            if self._lock_owner != threading.get_ident():
                with self._engine():
                    pass

    def _step(self, core: EngineCore) -> None:
        for output in core.step():
            state = self._live.get(output.sequence_id)
            if state is not None:
                state.take(output, core.finish)

    @contextmanager
    def _engine(self) -> Iterator[EngineCore]:
        """The core, for one thread at a time; at the end, requests that nobody waits for are dropped.

        Whatever fails inside, but for a refused request, ends half-way. Then all live requests end as aborted (or fail,
        if the engine died), and the engine is ready for new ones (or says why it is not).
        """
        with self._lock:
            self._lock_owner = threading.get_ident()
            try:
                try:
                    yield self._core
                finally:
                    while self._left:
                        self._drop(self._left.popleft())
            except RequestError:
                raise
            except BaseException as error:
                self._core.reset()
                for state in self._live.values():
                    state.abort(str(error) if isinstance(error, EngineDeadError) else None)
                self._live.clear()
                raise
            finally:
                self._lock_owner = None

    def _drop(self, state: RequestState) -> None:
        """Forgets a request, aborting it if it has not ended."""
        for sequence_id in state.spec.sequence_ids:
            self._core.finish(sequence_id, "abort")
            self._live.pop(sequence_id, None)
        state.abort()

    def _states(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestState]:
        """Checks and tokenizes everything; nothing is queued yet."""
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if not isinstance(sampling_params, Sequence):
            raise RequestError(
                f"sampling_params is {type(sampling_params).__name__}; give a SamplingParams, or one for each prompt",
                param="sampling_params",
            )
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(sampling_params)} sampling_params; give one, or one for each",
                param="sampling_params",
            )
        return [self._state(prompt, params) for prompt, params in zip(prompts, sampling_params)]

    def _state(self, prompt: Prompt, params: SamplingParams) -> RequestState:
        spec = self._inputs.process(prompt, params)
        self._core.check(spec.sequence(0))
        return RequestState(spec, self.tokenizer)
