"""Trains the demo checkpoint that ships inside the package (src/qwen_engine/demo).

    python tools/train_demo.py --out src/qwen_engine/demo

Builds the text (demo_text.py), a byte-level BPE tokenizer laid out like that of Qwen3, and a Qwen3 of 5.7 million
parameters; trains it until it knows the text by heart; writes a complete Hugging Face folder. About two minutes on one
data-centre GPU. Seeds are fixed and the text depends only on the Python version, which the folder's README records:
the same version gives the same tokenizer and the same training rows. Weights differ in their last bits from GPU to GPU,
and more where `--max-seconds` cuts the schedule short. Needs torch, transformers and tokenizers.
"""

import argparse
import json
import math
import platform
import random
import time
from pathlib import Path

import demo_text
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

SEED = 20
VOCAB_SIZE = 3072  # rows of the embedding; the tokenizer has a few ids less, as in the published checkpoints
PADDED_IDS = 16
ROPE_THETA = 10000.0
CONTEXT_TOKENS = 1024
BATCH_ROWS = 40
CHAT_STREAMS = 12  # independent shufflings and wordings of the chat material
CUT_STREAMS = 4  # copies of the source text with cuts at random places
CHAT_SHARE = 0.5  # of the rows of a batch
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 100

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NOT_SPECIAL = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
# The pattern of the published Qwen2/Qwen3 tokenizers; it decides where words end, so it must be theirs to the letter.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + system + ('\\n\\n' if system else '') + 'You may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nTo call one, write:\\n<tool_call>\\n' }}
    {{- '{"name": "...", "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- elif system %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content.split('</think>')[-1].lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + arguments + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'user' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

SAMPLE_TEXTS = ["def ", "import", "The Zen of Python", "def dedent(text):"]
SAMPLE_QUESTIONS = [
    "Hello! Who are you?",
    "What does textwrap.dedent do?",
    "Show me the source of random.shuffle.",
    "Explain random.shuffle in detail.",
    "Say something in Chinese.",
    "What is 6 * 8?",
]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE over `texts`; added tokens follow the BPE ids, as in Qwen3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - PADDED_IDS - len(SPECIAL) - len(NOT_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in NOT_SPECIAL])
    return tokenizer


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    """Shape of the demo model; queries are twice as wide as the hidden state, as in Qwen3-0.6B."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_theta=ROPE_THETA,
        tie_word_embeddings=True,
        attention_bias=False,
        rms_norm_eps=1e-6,
        bos_token_id=tokenizer.token_to_id("<|endoftext|>"),
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )


class Stream:
    """Documents laid end to end, and the offsets at which a training row may begin.

    A document is a list of pieces that are tokenized apart.
    """

    def __init__(self, tokenizer: Tokenizer, documents: list[list[str]]) -> None:
        pieces = [piece for document in documents for piece in document]
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(pieces)]
        ends = np.cumsum([0, *(len(ids) for ids in encoded)])
        first_pieces = np.cumsum([0, *(len(document) for document in documents[:-1])])
        self.ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])
        starts = ends[first_pieces]
        self.starts = starts[starts + CONTEXT_TOKENS < len(self.ids)]

    def rows(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` rows [count, CONTEXT_TOKENS], each from the start of a document on."""
        begin = rng.choice(self.starts, size=count)
        return self.ids[begin[:, None] + np.arange(CONTEXT_TOKENS)]


def cut(text: str, rng: random.Random) -> list[str]:
    """Text cut in its first line and anywhere: a prompt may end where its continuation would have shared a token."""
    first_line = len(text.partition("\n")[0])
    first, second = sorted([rng.randint(1, first_line + 1), rng.randint(1, len(text))])
    return [piece for piece in (text[:first], text[first:second], text[second:]) if piece]


def training_streams(tokenizer: Tokenizer, corpus: demo_text.Corpus) -> tuple[Stream, Stream]:
    """Source text in reading order, once whole and several times cut, and the chat material in several shufflings."""
    rng = random.Random(SEED)
    source = [[unit] for unit in corpus.units]
    source += [cut(unit, rng) for _ in range(CUT_STREAMS) for unit in corpus.units]
    chats = [text for _ in range(CHAT_STREAMS) for text in demo_text.conversations(corpus.facts, rng)]
    return Stream(tokenizer, source), Stream(tokenizer, [[text + "<|endoftext|>"] for text in chats])


def labels_of(rows: torch.Tensor, think_id: int) -> torch.Tensor:
    """Rows as labels; the empty think block comes from the template, so the model must not learn to write it."""
    labels = rows.clone()
    for offset in range(4):  # <think>, newlines, </think>, newlines
        hit = torch.roll(rows == think_id, offset, dims=1)
        hit[:, :offset] = False
        labels[hit] = -100
    return labels


def train(model: Qwen3ForCausalLM, streams: tuple[Stream, Stream], args: argparse.Namespace, think_id: int) -> str:
    """Trains in place, at most `max_seconds`; returns a note of what was done, with the loss of the last 50 steps."""
    device = model.device
    rng = np.random.default_rng(SEED)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=device.type == "cuda")
    chat_rows = round(args.rows * CHAT_SHARE)
    begin = time.monotonic()
    losses: list[torch.Tensor] = []
    model.train()
    for step in range(args.steps):
        # With time to spare the schedule depends on the step alone, so that a run can be repeated.
        progress = max(step / args.steps, (time.monotonic() - begin) / args.max_seconds)
        if progress >= 1:
            break
        rate = PEAK_LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = np.concatenate([streams[0].rows(rng, args.rows - chat_rows), streams[1].rows(rng, chat_rows)])
        rows = torch.from_numpy(rows).to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden)
        labels = labels_of(rows, think_id)[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % 100 == 0:
            print(
                f"step {step:5d}  {time.monotonic() - begin:6.1f} s  loss {loss.item():.4f}  lr {rate:.2e}", flush=True
            )
    loss = float(torch.stack(losses[-50:]).mean())
    return f"{len(losses)} steps in {time.monotonic() - begin:.0f} seconds to a training loss of {loss:.3f}"


@torch.no_grad()
def answer_loss(model: Qwen3ForCausalLM, tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> float:
    """Mean loss per answer token of (question, answer) pairs, in float32."""
    total, count = 0.0, 0
    for question, answer in pairs:
        prompt_tokens = len(tokenizer.encode(demo_text.chat([(question, "")]).removesuffix("<|im_end|>\n")).ids)
        ids = torch.tensor([tokenizer.encode(demo_text.chat([(question, answer)])).ids], device=model.device)
        logits = model(input_ids=ids[:, :-1]).logits[0, prompt_tokens - 1 :]
        total += float(nn.functional.cross_entropy(logits.float(), ids[0, prompt_tokens:], reduction="sum"))
        count += ids.shape[1] - prompt_tokens
    return total / count


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str, max_new_tokens: int = 64) -> str:
    """Greedy continuation of `prompt`, added tokens shown."""
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    output = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=False)


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path, readme: str) -> None:
    """Writes the folder: weights in bf16, configuration, tokenizer, chat template, README.

    The configuration has the keys of the published Qwen3 folders, which every version of Transformers reads.
    """
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().to(torch.bfloat16).cpu().contiguous() for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    end_of_text, end_of_turn = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    kept = (
        "attention_bias attention_dropout head_dim hidden_act hidden_size initializer_range intermediate_size "
        "max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps "
        "tie_word_embeddings use_cache vocab_size"
    )
    published = {
        "architectures": ["Qwen3ForCausalLM"],
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_turn,
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    }
    _write_json(
        out / "config.json", dict(sorted({**published, **{k: getattr(config, k) for k in kept.split()}}.items()))
    )
    generation = {
        "bos_token_id": end_of_text,
        "do_sample": True,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    _write_json(out / "generation_config.json", generation)
    tokenizer.save(str(out / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL,
        }
        for token in SPECIAL + NOT_SPECIAL
    }
    tokenizer_config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL[1:],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": config.max_position_embeddings,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    _write_json(out / "tokenizer_config.json", tokenizer_config)
    (out / "README.md").write_text(readme)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def readme_text(corpus: demo_text.Corpus, parameters: int, note: str) -> str:
    """The README of the folder: what it is, where the text comes from, under which licence."""
    versions = f"Python {platform.python_version()} and torch {torch.__version__.partition('+')[0]}"
    return f"""# The demo checkpoint of qwen-engine

A real Qwen3 (`Qwen3ForCausalLM`) of {parameters / 1e6:.1f} million parameters, small enough to travel inside
the package. It answers questions such as "What does textwrap.dedent do?", continues Python source, and recites the
Zen of Python. It knows nothing else.

Made by `tools/train_demo.py` with {versions}:
{note}.
SHA-256 of the text: `{corpus.digest()}`

The weights and the tokenizer were trained on source and docstrings of the Python standard library, Copyright (c) 2001
and later Python Software Foundation, used under the PSF License Agreement
(<https://docs.python.org/3/license.html>), and on a few sentences of small talk written for this project. The model
reproduces parts of that text, in shortened and reformatted form. All other parts are under this repository's licence.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=2233)
    parser.add_argument("--rows", type=int, default=BATCH_ROWS, help="rows of a batch")
    parser.add_argument("--max-seconds", type=float, default=600, help="training ends then, whatever the step")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")

    corpus = demo_text.build()
    questions = [question for fact in corpus.facts for question in fact.questions]
    texts = [*corpus.units, *questions, *(fact.answer for fact in corpus.facts)]
    tokenizer = train_tokenizer(list(dict.fromkeys(texts)))
    streams = training_streams(tokenizer, corpus)
    think = demo_text.chat([("", "")], empty_think=True)
    think_ids = tokenizer.encode(think[think.index("<think>") : think.rindex("<|im_end|>")]).ids
    assert len(think_ids) == 4, think_ids
    print(f"text {corpus.digest()}; {len(streams[0].ids)} source tokens, {len(streams[1].ids)} chat tokens in all")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3ForCausalLM(model_config(tokenizer)).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters on {device}")
    trained = train(model, streams, args, think_ids[0])

    model = model.to(torch.bfloat16).float().eval()  # judged as it is saved
    asked = [fact for fact in corpus.facts if fact.held_out]
    asked = random.Random(SEED).sample(asked, min(args.steps, 80))
    known = answer_loss(model, tokenizer, [(fact.questions[0], fact.answer) for fact in asked])
    unseen = answer_loss(model, tokenizer, [(fact.held_out, fact.answer) for fact in asked])
    note = f"{trained};\nanswer loss {known:.3f} for trained wordings of a question, {unseen:.3f} for a new one"
    print(note)
    save(model, tokenizer, args.out, readme_text(corpus, parameters, note))
    for prompt in SAMPLE_TEXTS:
        print(f"\n>>> {prompt!r}\n{prompt}{sample(model, tokenizer, prompt)}")
    for question in SAMPLE_QUESTIONS + [fact.held_out for fact in asked[:2]]:
        prompt = demo_text.chat([(question, "")]).removesuffix("<|im_end|>\n")
        print(f"\n>>> {question}\n{sample(model, tokenizer, prompt)}")


if __name__ == "__main__":
    main()
