"""The command line: complete prompts, or chat. Text goes to stdout, everything else to stderr.

Exit codes: 0 done, 2 bad input (one line says what), 130 interrupted. `serve` belongs to `server.serve`, `bench` and
`results` to `bench.cli`; they add 1: the engine died, a check failed, or a figure got worse.
"""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from qwen_engine import __version__
from qwen_engine.engine_args import HelpFormatter, add_engine_arguments, engine_options
from qwen_engine.errors import QwenEngineError, RequestError
from qwen_engine.outputs import RequestOutput

if TYPE_CHECKING:
    from qwen_engine.llm import LLM

DEFAULT_PROMPT = "The Zen of Python"
DEFAULT_MAX_TOKENS = 128
DESCRIPTION = "Run a Qwen3 model: complete prompts, or chat with it."
EPILOG = """\
examples:
  python -m qwen_engine                                   the demo model completes a prompt
  python -m qwen_engine --model Qwen/Qwen3-0.6B --prompt "Once upon a time" --max-tokens 64
  python -m qwen_engine chat --model ./Qwen3-8B           talk to it
  python -m qwen_engine serve --model Qwen/Qwen3-8B       serve it over HTTP, with OpenAI's API
  python -m qwen_engine bench --help                      measure it: stress suites, throughput, latency, start
  python -m qwen_engine results --help                    compare and report what was measured

Each of chat, serve, bench and results has a --help of its own.
"""
CHAT_HELP = "/reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        args = _parse(sys.argv[1:] if argv is None else list(argv))
        logging.getLogger("qwen_engine").setLevel(logging.INFO if args.verbose else logging.WARNING)
        return args.run(args)
    except QwenEngineError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; there is nobody to tell
        return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    if argv[:1] in (["bench"], ["results"]):
        from qwen_engine.bench.cli import parse_args

        return parse_args(argv)
    if argv[:1] == ["serve"]:
        from qwen_engine.server.serve import parse_args as parse_serve_args

        return parse_serve_args(argv[1:])
    is_chat = argv[:1] == ["chat"]
    parser = argparse.ArgumentParser(
        prog="python -m qwen_engine" + (" chat" if is_chat else ""),
        description="Talk to a Qwen3 model. " + CHAT_HELP if is_chat else DESCRIPTION,
        usage=f"python -m qwen_engine {'chat' if is_chat else '[chat | serve | bench | results]'} [options]",
        epilog=None if is_chat else EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="demo", help="folder, Hugging Face repository, or demo")
    if is_chat:
        parser.add_argument("--system", metavar="TEXT", help="system message")
        parser.add_argument("--no-thinking", action="store_true", help="ask the model to answer without thinking first")
    else:
        parser.add_argument("--version", action="version", version=f"qwen-engine {__version__}")
        parser.add_argument(
            "--prompt",
            action="append",
            metavar="TEXT",
            help=f"text to complete; repeatable (default: {DEFAULT_PROMPT})",
        )
        parser.add_argument(
            "--chat", action="store_true", help="send each prompt as a chat message instead, and show the answer"
        )
    parser.add_argument("--verbose", action="store_true", help="log each phase of the start")
    _add_sampling_arguments(parser, "up to the context limit" if is_chat else str(DEFAULT_MAX_TOKENS))
    add_engine_arguments(parser)
    parser.set_defaults(run=_chat if is_chat else _complete)
    return parser.parse_args(argv[1:] if is_chat else argv)


def _add_sampling_arguments(parser: argparse.ArgumentParser, default_max_tokens: str) -> None:
    group = parser.add_argument_group("sampling (defaults: the checkpoint's generation_config.json)")
    help_text = f"most tokens to write, thinking included (default: {default_max_tokens})"
    group.add_argument("--max-tokens", type=int, metavar="N", help=help_text)
    for name, text in (
        ("--temperature", "0 (always the most likely token) to 2"),
        ("--top-p", "keep the most likely tokens that together have this probability"),
        ("--min-p", "keep tokens at least this many times as likely as the most likely"),
        ("--presence-penalty", "subtracted from the logits of tokens that were written, -2 to 2"),
        ("--frequency-penalty", "the same, for each time they were written"),
        ("--repetition-penalty", "divides the logits of tokens in prompt or output; 1 does nothing"),
    ):
        group.add_argument(name, type=float, metavar="X", help=text)
    group.add_argument("--top-k", type=int, metavar="N", help="keep the N most likely tokens; 0 keeps all")
    group.add_argument("--sampling-seed", type=int, metavar="N", help="makes sampling repeatable")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the output; repeatable")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="do not stop at end-of-sequence tokens")


def _load(args: argparse.Namespace) -> LLM:
    from qwen_engine.llm import LLM

    return LLM(args.model, **engine_options(args))


def _sampling_params(args: argparse.Namespace, llm: LLM) -> Any:
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    given = {name: getattr(args, name) for name in (*names, "stop", "ignore_eos") if getattr(args, name) is not None}
    max_tokens = args.max_tokens
    if max_tokens is None and args.run is _complete:
        max_tokens = DEFAULT_MAX_TOKENS
    return llm.default_sampling_params(max_tokens=max_tokens, seed=args.sampling_seed, **given)


def check_room(llm: LLM, prompt_token_ids: Sequence[int], max_tokens: int | None) -> None:
    """Raises RequestError if as many tokens as were asked for do not fit behind the prompt; None asks for none."""
    room = llm.max_model_len - len(prompt_token_ids)
    if max_tokens is not None and 0 < room < max_tokens:
        raise RequestError(
            f"--max-tokens is {max_tokens}, but only {room} fit: the prompt has {len(prompt_token_ids)} tokens, and "
            f"max_model_len is {llm.max_model_len}",
            param="max_tokens",
        )


def _complete(args: argparse.Namespace) -> int:
    prompts = args.prompt or [DEFAULT_PROMPT]
    with _load(args) as llm:
        params = _sampling_params(args, llm)
        if args.chat:
            inputs = [llm.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts]
        else:
            inputs = [llm.encode(prompt) for prompt in prompts]
        for token_ids in inputs:
            check_room(llm, token_ids, args.max_tokens)
        outputs = _print_in_turn(llm.stream(inputs, params), prompts, echo=not args.chat)
    print_summary(outputs, params.max_tokens)
    return 0


def _print_in_turn(stream: Iterator[RequestOutput], prompts: Sequence[str], *, echo: bool) -> list[RequestOutput]:
    """Shows the outputs one after the other: the first unfinished one live, the others when their turn comes."""
    latest: dict[int, RequestOutput] = {}
    current, shown, first_id = 0, 0, None
    for output in stream:
        first_id = int(output.request_id) if first_id is None else first_id
        latest[int(output.request_id) - first_id] = output
        while current in latest:
            text = latest[current].outputs[0].text
            if shown == 0:
                _write(prompts[current] if echo else f"> {prompts[current]}\n")
            _write(text[shown:])
            shown = max(shown, len(text), 1)
            if not latest[current].finished:
                break
            _write("\n\n" if current + 1 < len(prompts) else "\n")
            current, shown = current + 1, 0
    return [latest[index] for index in sorted(latest)]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def print_summary(outputs: Sequence[RequestOutput], max_tokens: int | None) -> None:
    """Prompt tokens over the time until all first tokens were there, decode tokens over the rest; what was cut off."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_decoded = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    first_token_s = max(output.metrics.first_token_s for output in outputs)
    decode_s = max(output.metrics.finished_s for output in outputs) - first_token_s
    parts = [f"prompt: {num_prompt} tokens, {num_prompt / first_token_s:.1f} tok/s"]
    if num_decoded and decode_s > 0:
        parts.append(f"decode: {num_decoded} tokens, {num_decoded / decode_s:.1f} tok/s")
    for note, count in Counter(_cut_note(output, max_tokens) for output in outputs).items():
        if note is not None:
            parts.append(note if len(outputs) == 1 else f"{count} of {len(outputs)} {note}")
    print(" | ".join(parts), file=sys.stderr)


def _cut_note(output: RequestOutput, max_tokens: int | None) -> str | None:
    """What ended an output before its own end; None if nothing did."""
    num_tokens, text = len(output["token_ids"]), output["text"]
    if output["finish_reason"] != "length":
        return None
    limit = f"--max-tokens {num_tokens}" if num_tokens == max_tokens else "the context limit (max_model_len)"
    is_thinking = "<think>" in text and "</think>" not in text
    return f"cut off at {limit}" + (", before the thinking had ended: there is no answer" if is_thinking else "")


def _chat(args: argparse.Namespace) -> int:
    with _load(args) as llm:
        params = _sampling_params(args, llm)
        start = [{"role": "system", "content": args.system}] if args.system else []
        messages = list(start)
        print(textwrap.fill(CHAT_HELP, 100), file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return 0
            if line == "/quit":
                return 0
            if line == "/reset":
                messages = list(start)
                continue
            if not line:
                continue
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(llm, messages, params, args)
                messages.append({"role": "assistant", "content": answer})
            except QwenEngineError as error:
                messages.pop()
                print(f"error: {error}", file=sys.stderr)


def _answer(llm: LLM, messages: list[dict[str, str]], params: Any, args: argparse.Namespace) -> str:
    """Streams the model's answer to stdout; Ctrl-C ends it early and keeps what is there."""
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}} if args.no_thinking else {}
    token_ids = llm.apply_chat_template(messages, **kwargs)
    check_room(llm, token_ids, args.max_tokens)
    text, note = "", None
    try:
        for output in llm.stream([token_ids], params):
            _write(output["text"][len(text) :])
            text, note = output["text"], _cut_note(output, args.max_tokens)
    except KeyboardInterrupt:
        _write(" [stopped]")
    _write("\n")
    if note is not None:
        print(note, file=sys.stderr)
    return text
