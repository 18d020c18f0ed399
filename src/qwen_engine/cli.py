"""The command line: complete prompts, or chat. Text goes to stdout, everything else to stderr.

Exit codes: 0 done, 2 bad input (one line says what), 130 interrupted. `serve` belongs to `server.serve`, `bench` and
`results` to `bench.cli`; they add 1: the engine died, a check failed, or a figure got worse.
"""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from qwen_engine.engine_args import add_engine_arguments, engine_options
from qwen_engine.errors import QwenEngineError
from qwen_engine.request import RequestOutput

if TYPE_CHECKING:
    from qwen_engine.llm import LLM

DEFAULT_PROMPT = "The Zen of Python"
DESCRIPTION = "Run a Qwen3 model: complete prompts, or chat with it."
EPILOG = """\
examples:
  python -m qwen_engine                                   the demo model completes a prompt
  python -m qwen_engine --model Qwen/Qwen3-0.6B --prompt "Once upon a time" --max-tokens 64
  python -m qwen_engine chat --model ./Qwen3-8B           talk to it
  python -m qwen_engine serve --model Qwen/Qwen3-8B       serve it over HTTP, with OpenAI's API
  python -m qwen_engine bench --help                      measure it: stress suites, throughput, latency, start
  python -m qwen_engine results --help                    compare and report what was measured
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
        usage=None if is_chat else "python -m qwen_engine [chat | serve | bench | results] [options]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="demo", help="folder, Hugging Face repository, or 'demo' (default)")
    if is_chat:
        parser.add_argument("--system", help="system message")
        parser.add_argument("--no-thinking", action="store_true", help="ask the model to answer without thinking first")
    else:
        parser.add_argument("--prompt", action="append", help="text to complete; may be given several times")
        parser.add_argument("--chat", action="store_true", help="send each prompt as a chat message")
    parser.add_argument("--verbose", action="store_true", help="log each phase of the start")
    _add_sampling_arguments(parser, default_max_tokens=None if is_chat else 128)
    add_engine_arguments(parser)
    parser.set_defaults(run=_chat if is_chat else _complete)
    return parser.parse_args(argv[1:] if is_chat else argv)


def _add_sampling_arguments(parser: argparse.ArgumentParser, default_max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling (defaults: the checkpoint's generation_config.json)")
    limit = "up to the context limit" if default_max_tokens is None else str(default_max_tokens)
    group.add_argument("--max-tokens", type=int, default=default_max_tokens, help=f"most tokens to write ({limit})")
    group.add_argument("--temperature", type=float, help="0 always takes the most likely token")
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int)
    group.add_argument("--min-p", type=float)
    group.add_argument("--presence-penalty", type=float)
    group.add_argument("--frequency-penalty", type=float)
    group.add_argument("--repetition-penalty", type=float)
    group.add_argument("--sampling-seed", dest="sampling_seed", type=int, help="makes sampling repeatable")
    group.add_argument("--stop", action="append", help="text that ends the output; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="do not stop at end-of-sequence tokens")


def _load(args: argparse.Namespace) -> LLM:
    from qwen_engine.llm import LLM

    return LLM(args.model, **engine_options(args))


def _sampling_params(args: argparse.Namespace, llm: LLM) -> Any:
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    given = {name: getattr(args, name) for name in (*names, "stop", "ignore_eos") if getattr(args, name) is not None}
    return llm.default_sampling_params(max_tokens=args.max_tokens, seed=args.sampling_seed, **given)


def _complete(args: argparse.Namespace) -> int:
    prompts = args.prompt or [DEFAULT_PROMPT]
    with _load(args) as llm:
        params = _sampling_params(args, llm)
        inputs: list[Any] = list(prompts)
        if args.chat:
            inputs = [llm.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts]
        outputs = _print_in_turn(llm.stream(inputs, params), prompts, echo=not args.chat)
    _print_speed(outputs)
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


def _print_speed(outputs: Sequence[RequestOutput]) -> None:
    """Prompt tokens over the time until every request had its first token; decode tokens over the rest."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_decoded = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    first_token_s = max(output.metrics.first_token_s for output in outputs)
    decode_s = max(output.metrics.finished_s for output in outputs) - first_token_s
    parts = [f"prompt: {num_prompt} tokens, {num_prompt / first_token_s:.1f} tok/s"]
    if num_decoded and decode_s > 0:
        parts.append(f"decode: {num_decoded} tokens, {num_decoded / decode_s:.1f} tok/s")
    print(" | ".join(parts), file=sys.stderr)


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
                answer = _answer(llm, messages, params, thinking=not args.no_thinking)
                messages.append({"role": "assistant", "content": answer})
            except QwenEngineError as error:
                messages.pop()
                print(f"error: {error}", file=sys.stderr)


def _answer(llm: LLM, messages: list[dict[str, str]], params: Any, *, thinking: bool) -> str:
    """Streams the model's answer to stdout; Ctrl-C ends it early and keeps what is there."""
    kwargs = {} if thinking else {"chat_template_kwargs": {"enable_thinking": False}}
    text = ""
    try:
        for output in llm.stream([llm.apply_chat_template(messages, **kwargs)], params):
            new = output.outputs[0].text
            _write(new[len(text) :])
            text = new
    except KeyboardInterrupt:
        _write(" [stopped]")
    _write("\n")
    return text
