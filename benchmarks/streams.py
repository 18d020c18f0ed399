"""Many streams at once against a running server: are they all complete, and is none mixed up with another?

    python benchmarks/streams.py --base-url http://127.0.0.1:8000 [--num-streams 1000] [--max-tokens 32]

Asks for greedy completions of different prompts twice, in one batch and as concurrent streams, some of which are read
slowly, and compares the texts. On a GPU in bf16 a tie may fall differently in another batch: use a float32 engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

from qwen_engine.engine_args import HelpFormatter

COMPLETIONS = "/v1/completions"
MAX_PROMPTS = 500  # of one batch request


def different_streams(base_url: str, *, num_streams: int, max_tokens: int) -> list[int]:
    """Indexes of the streams whose text is not what the same prompt gives in a batch."""
    return asyncio.run(_different_streams(base_url, num_streams, max_tokens))


async def _different_streams(base_url: str, num_streams: int, max_tokens: int) -> list[int]:
    prompts = [f"{index} {'word ' * (index % 23)}" for index in range(num_streams)]
    body = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as session:
        expected: list[str] = []
        for start in range(0, num_streams, MAX_PROMPTS):
            batch = {**body, "prompt": prompts[start : start + MAX_PROMPTS]}
            async with session.post(COMPLETIONS, json=batch) as response:
                response.raise_for_status()
                expected += [choice["text"] for choice in (await response.json())["choices"]]
        reads = [_read(session, {**body, "prompt": prompt}, slow=i % 7 == 0) for i, prompt in enumerate(prompts)]
        texts = await asyncio.gather(*reads)
    return [index for index, (text, right) in enumerate(zip(texts, expected)) if text != right]


async def _read(session: aiohttp.ClientSession, body: dict[str, Any], *, slow: bool) -> str:
    text = ""
    async with session.post(COMPLETIONS, json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
                if slow:
                    await asyncio.sleep(0.01)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="where the server is")
    parser.add_argument("--num-streams", type=int, default=1000, help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of each")
    args = parser.parse_args()
    start = time.perf_counter()
    try:
        wrong = different_streams(args.base_url, num_streams=args.num_streams, max_tokens=args.max_tokens)
    except aiohttp.ClientConnectionError as error:
        sys.exit(f"error: {error}; start the server first")
    seconds = time.perf_counter() - start
    print(
        f"{args.num_streams} streams of {args.max_tokens} tokens in {seconds:.1f} s, {len(wrong)} differ: {wrong[:9]}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
