"""Parts of results that no engine has to be run for."""

from __future__ import annotations

ENGINE = {
    "model": "demo",
    "dtype": "bfloat16",
    "load_format": "dummy",
    "tensor_parallel_size": 1,
    "max_model_len": 4096,
    "enforce_eager": False,
}
