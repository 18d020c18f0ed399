"""Loading a checkpoint: time, peak host memory of every rank, GPU memory. Weights are random, the files are real.

    python benchmarks/load.py --config-folder CONFIG --tensor-parallel-size 2 [--dtype bfloat16] [--workdir DIR]

Writes a sharded checkpoint of that shape (65 GB for Qwen3-32B in bf16), loads it `--repeats` times and removes it. The
first load after writing finds the files in the page cache if memory allows. Leaves a result file in --results-dir.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from validate import write_random_checkpoint

from qwen_engine import LLM
from qwen_engine.bench.facts import engine_facts
from qwen_engine.bench.output import add_results_dir_argument, at_least
from qwen_engine.bench.results import check_writable, new_result, write_result
from qwen_engine.config import ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.engine_args import HelpFormatter
from qwen_engine.errors import QwenEngineError
from qwen_engine.models.weights import sharding_table


def peak_host_gb(pid: int | str) -> tuple[float, float]:
    """(peak resident memory, anonymous memory now) of a process in GB; the first counts mapped pages of files too."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return tuple(int(fields[name].split()[0]) / 1e6 for name in ("VmHWM", "RssAnon"))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--config-folder", type=Path, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workdir", type=Path, help="where the checkpoint is written (default: the temporary folder)")
    parser.add_argument("--repeats", type=at_least(1), default=2)
    add_results_dir_argument(parser)
    args = parser.parse_args()
    check_writable(args.results_dir)
    model, dtype = ModelConfig.from_folder(args.config_folder), getattr(torch, args.dtype)
    num_needed = sum(math.prod(entry.shape) for entry in sharding_table(model, TPGroup())) * dtype.itemsize
    num_free = shutil.disk_usage(args.workdir or tempfile.gettempdir()).free
    if num_free < num_needed:
        parser.error(f"the checkpoint takes {num_needed / 1e9:.1f} GB, {num_free / 1e9:.1f} GB are free: use --workdir")
    rows = []
    with tempfile.TemporaryDirectory(dir=args.workdir) as temporary:
        folder = Path(temporary)
        start = time.perf_counter()
        write_random_checkpoint(args.config_folder, folder, dtype, torch.device(args.device))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"wrote {num_bytes / 1e9:.1f} GB in {time.perf_counter() - start:.1f} s", flush=True)
        for _ in range(args.repeats):
            start = time.perf_counter()
            with LLM(
                folder,
                dtype=args.dtype,
                device=args.device,
                tensor_parallel_size=args.tensor_parallel_size,
                skip_tokenizer_init=True,
                max_model_len=min(4096, model.max_context_tokens),
            ) as llm:
                ready_s = time.perf_counter() - start
                workers = llm._core._executor.worker_pids
                peaks = {rank: peak_host_gb(pid) for rank, pid in enumerate([os.getpid(), *workers])}
                gpu_gb = None
                if args.device.startswith("cuda"):
                    gpu_gb = [
                        round((total - free) / 1e9, 1)
                        for free, total in (torch.cuda.mem_get_info(i) for i in range(args.tensor_parallel_size))
                    ]
                facts = engine_facts(llm)
            row = {"ready_s": round(ready_s, 2), "host_peak_gb": {r: round(p[0], 2) for r, p in peaks.items()}}
            row |= {"host_anonymous_gb": {r: round(p[1], 2) for r, p in peaks.items()}, "gpu_used_gb": gpu_gb}
            rows.append(row)
            print(row, flush=True)
    ready_s = [row["ready_s"] for row in rows]
    result = new_result(
        "load",
        metrics={
            "checkpoint_bytes": num_bytes,
            "first_ready_s": ready_s[0],
            "ready_s": min(ready_s),
            "load_gb_per_s": num_bytes / 1e9 / min(ready_s),
            "host_peak_gb": max(max(row["host_peak_gb"].values()) for row in rows),
            "host_anonymous_gb": max(max(row["host_anonymous_gb"].values()) for row in rows),
        },
        requests=rows,
        parameters={"repeats": args.repeats, "random_weights": True},
        facts={**facts, "engine_config": {**facts["engine_config"], "model": args.config_folder.name}},
    )
    print(f"-> {write_result(result, args.results_dir)}")


if __name__ == "__main__":
    try:
        main()
    except QwenEngineError as error:
        sys.exit(f"error: {error}")
