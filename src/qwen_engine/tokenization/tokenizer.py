"""A checkpoint's tokenizer: text and chats to ids, ids to bytes.

Reads tokenizer.json with the `tokenizers` library directly; importing transformers costs seconds of start-up and would
pull in torch. Byte-level BPE (every Qwen3) has a known byte string per id, so decoding is joining bytes and reading
them as UTF-8; other decoders go through the library. No method raises on an unknown id: it has no bytes, which covers
the padding rows of the embedding that a model can sample but the tokenizer does not have.

Used by the engine's front (prompts), by `IncrementalDetokenizer` (outputs) and by logprobs (token strings and bytes).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders

from qwen_engine.errors import ConfigError, RequestError
from qwen_engine.tokenization.chat_template import ChatTemplate

_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ID_LIMIT = 2**32  # the library holds ids as unsigned 32-bit integers


class Tokenizer:
    """Encodes, decodes and renders chats. Safe to share between threads.

    `backend` is the library's tokenizer, `config` the content of tokenizer_config.json (special token names, chat
    template); `folder` is only used in messages. `special_ids`, which `skip_special_tokens` hides (Qwen3's <think> and
    <tool_call> are none), and `bytes_of_id` are for reading.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None, *, folder: Path | None = None
    ) -> None:
        config = config or {}
        named = {name: text for name in _NAMED_SPECIAL_TOKENS if (text := _token_text(config.get(name)))}
        extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
        texts = [*named.values(), *(_token_text(token) for token in (extra if isinstance(extra, list) else []))]
        _mark_special(backend, [text for text in texts if text])
        backend.no_truncation()
        backend.no_padding()

        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._added_ids = {token.content: id_ for id_, token in added.items()}
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.bytes_of_id = _BytesOfId(backend, {id_: token.content.encode() for id_, token in added.items()})
        self._text_of_id: dict[int, str] = {}  # of those that were asked for
        self._chat_template = ChatTemplate(config.get("chat_template"), variables=named)
        self._folder = folder
        self.is_byte_level = _is_byte_level(backend)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """Load from a local folder, never from the network. Raises ConfigError if there is no readable tokenizer."""
        folder = Path(path)
        config = _read_json(folder / "tokenizer_config.json")
        special = _read_json(folder / "special_tokens_map.json")
        config = special | {key: value for key, value in config.items() if value is not None}
        template_file = folder / "chat_template.jinja"  # newer checkpoints keep the template beside the config
        if template_file.is_file():
            config["chat_template"] = template_file.read_text(encoding="utf-8")
        return cls(_load_backend(folder), config, folder=folder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written out in the text become their ids. RequestError if it is not Unicode."""
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be a string, not {type(text).__name__}", param="prompt")
        if not text.isascii() and not is_unicode(text):
            raise RequestError("the text holds a lone surrogate (half of a UTF-16 pair); send UTF-8", param="prompt")
        # A batch: unlike `encode`, this leaves the interpreter to other threads, for seconds if the text is long.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD, unknown ids become nothing."""
        if self.is_byte_level:
            hidden = self.special_ids if skip_special_tokens else frozenset()
            return b"".join([self.bytes_of_id[id_] for id_ in ids if id_ not in hidden]).decode(errors="replace")
        known = [id_ for id_ in ids if 0 <= id_ < _ID_LIMIT]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def chat_template_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that the chat template makes of `messages`. Raises RequestError (see `ChatTemplate.render`)."""
        if not self._chat_template:
            raise RequestError(
                f"the tokenizer in {self._folder} has no chat template; send a plain prompt", param="messages"
            )
        return self._chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs,
        )

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """`chat_template_text` as ids. The template writes every special token itself, so encoding adds none.

        Raises RequestError, which names the field that is at fault.
        """
        text = self.chat_template_text(messages, **options)
        try:
            return self.encode(text, add_special_tokens=False)
        except RequestError as error:
            is_fault_of_tools = not is_unicode(json.dumps(options.get("tools"), ensure_ascii=False, default=str))
            raise error.renamed({"prompt": "tools" if is_fault_of_tools else "messages"}) from error

    def token_id(self, text: str) -> int | None:
        """The added token that is spelled `text`, None if the tokenizer has none."""
        return self._added_ids.get(text)

    def token_bytes(self, id_: int) -> bytes:
        """Bytes the id stands for, b"" if the tokenizer does not know it. May be part of a UTF-8 character."""
        return self.bytes_of_id[id_]

    def token_str(self, id_: int) -> str:
        """The id's text for display, special tokens included; part of a character shows as U+FFFD.

        Always the same object: log-probabilities of a long prompt hold a text for each of hundreds of thousands of ids.
        """
        text = self._text_of_id.get(id_)
        if text is None:
            text = self._text_of_id[id_] = self.bytes_of_id[id_].decode(errors="replace")
        return text


class _BytesOfId(dict[int, bytes]):
    """Bytes of every id, worked out when an id is first met: building the whole table would slow down start-up.

    A dict, because the detokenizer looks up every token that the engine produces.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added: dict[int, bytes]) -> None:
        super().__init__(added)  # their content is plain text, not in the byte alphabet
        self._backend = backend
        self._is_byte_level = _is_byte_level(backend)

    def __missing__(self, id_: int) -> bytes:
        token = self._backend.id_to_token(id_) if 0 <= id_ < _ID_LIMIT else None
        if token is None:
            return b""  # not stored: there is no end of unknown ids
        return self.setdefault(id_, self._spell(id_, token))

    def _spell(self, id_: int, token: str) -> bytes:
        if not self._is_byte_level:
            return self._backend.decode([id_], skip_special_tokens=False).encode()
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an entry outside the byte alphabet stands for its own text
            return token.encode()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    return isinstance(backend.decoder, decoders.ByteLevel)


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest is moved to U+0100 and up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(moved)}


_BYTE_OF_CHAR = _byte_alphabet()


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return tokenizers.Tokenizer.from_file(str(file))
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            from transformers import AutoTokenizer  # slow to import; only this older layout needs it

            return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    except Exception as error:  # the library raises bare Exception on a corrupt file
        raise ConfigError(f"cannot read the tokenizer in {folder}: {error}") from error
    raise ConfigError(
        f"no tokenizer in {folder} (tokenizer.json is missing); pass skip_tokenizer_init=True to work with token ids"
    )


def _mark_special(backend: tokenizers.Tokenizer, texts: list[str]) -> None:
    """tokenizer_config.json may name as special a token that tokenizer.json does not flag."""
    flagged = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in texts if text not in flagged and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def _token_text(token: Any) -> str | None:
    """tokenizer_config.json names a token as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can write it: no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
