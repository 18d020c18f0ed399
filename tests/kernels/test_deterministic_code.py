"""What the compiler makes of the deterministic kernels for a Hopper GPU: the instructions that their bits depend on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = r"""
import json
import re
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qwen_engine.kernels.gpu import push_reduce
from qwen_engine.kernels.gpu.deterministic import attention, products

POINTERS = dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16") | dict(scale_log2="fp32", eps="fp32")
POINTERS |= dict.fromkeys(("slots", "seq_lens", "block_tables", "query_start", "live_rows"), "*i32")
POINTERS |= dict.fromkeys(("partial_acc", "partial_sums"), "*fp32")
UNALIGNED = {"rows", "first_row", "max_spans", "num_kv_heads", "x_rows", "addresses", "site_word", "abort_address"}

def compiled(kernel, constants, types, num_warps, num_stages=3):
    kernel = kernel.function
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [name for name in names if types[name] in ("i32",) or str(types[name]).startswith("*")]
    code = triton.compile(
        ASTSource(
            fn=kernel,
            signature=types,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in UNALIGNED},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False},
    )
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code.asm["ttgir"], flags=re.MULTILINE))
    reduced = re.findall(r"\}\) : \(tensor<([\dx]+)xf32, (#\w+)>\)", code.asm["ttgir"])
    sums = [(shape, layouts[layout]) for shape, layout in reduced]
    return dict(ptx=code.asm["ptx"], shared=code.metadata.shared, sums=sums)

found = {"products": [], "attention": {}, "norms": []}
for gated in (False, True):
    for tiles in products._FEW_ROWS[gated] + products._MANY_ROWS[gated]:
        constants = dict(
            ROWS=tiles.rows, X_ROWS=tiles.x_rows, COLUMNS=tiles.columns, X_TILES_AT_ONCE=8, GATED=gated, TMA=True,
            DOT_DTYPE=tl.bfloat16, PDL=True,
        )
        types = dict(
            x=f"tensordesc<bf16[{tiles.x_rows}, {tiles.columns}]>",
            weight=f"tensordesc<bf16[{tiles.rows}, {tiles.columns}]>",
            out="*bf16",
        )
        found["products"].append(compiled(products._product_kernel, constants, types, tiles.warps, tiles.stages))
shared = dict(GROUP=4, HEAD_DIM=128, SPAN=256, BLOCK_SIZE=16, BLOCK_M=64, BLOCK_N=64, DOT_DTYPE=tl.bfloat16, WIDE=False)
for name, kernel, own in (
    ("prefill", attention._prefill_kernel, dict(MAX_ROWS=64)),
    ("decode", attention._span_kernel, dict(PDL=True, live_rows=None)),
):
    found["attention"][name] = compiled(kernel, shared | own, POINTERS, 4, 5)
found["merge"] = compiled(attention._merge_kernel, dict(HEAD_DIM=128, SPAN=256, PDL=True), POINTERS, 4)
for size in (1, 2, 4):
    constants = dict(
        PARTS=1, RANK=0, SIZE=size, INBOX_WORDS=1 << 20, DTYPE=tl.bfloat16, MINUS_ZERO=-(2**31), ROUND_SUM=True,
        BLOCK=4096, EARLY=True, PDL=True,
    )
    types = dict.fromkeys(("parts", "residual", "weight", "out"), "*i32")
    types |= dict(addresses=("i64",) * size, abort_address="i64", eps="fp32")
    kernel = push_reduce._push_add_rms_norm_kernel
    found["norms"].append(compiled(kernel, constants, types, push_reduce.warps_of(4096)))
print(json.dumps(found))
"""
HOPPER_SHARED_BYTES = 232_448


@pytest.fixture(scope="module")
def code():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    output = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert output.returncode == 0, output.stderr
    return json.loads(output.stdout.splitlines()[-1])


def dots(ptx: str) -> list[str]:
    return sorted(set(re.findall(r"wgmma\.mma_async\.[\w.]*|mma\.sync\.[\w.]*", ptx)))


def test_every_tile_of_a_product_goes_through_the_dots_of_a_warp_group(code):
    for product in code["products"]:
        (dot,) = dots(product["ptx"])
        assert re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16", dot)
        assert product["shared"] <= HOPPER_SHARED_BYTES
        assert product["sums"] == []


def test_decode_and_prefill_attention_have_the_same_dots_and_sum_in_the_same_layout(code):
    decode, prefill = code["attention"]["decode"], code["attention"]["prefill"]
    assert dots(decode["ptx"]) == dots(prefill["ptx"])
    assert len(dots(decode["ptx"])) == 2
    assert all("wgmma" in dot for dot in dots(decode["ptx"]))
    assert len(decode["sums"]) == 2  # largest score and total of the weights
    assert prefill["sums"] == decode["sums"] * 2  # in the loop with the mask and in that without


def test_a_norm_of_what_is_summed_adds_in_the_order_of_the_push(code):
    one, *several = code["norms"]
    assert len(one["sums"]) == 1
    assert all(norm["sums"] == one["sums"] for norm in several)
