"""Text for the demo checkpoint, taken from the standard library of the Python that runs this file.

Owns what the demo model knows: cleaned source of well-known pure-Python modules, questions and answers made from
the docstrings, the Zen of Python, and a little small talk. Uses the standard library only, imports nothing it
describes (except `builtins` and a few C modules, whose docstrings exist nowhere else), and is deterministic: the same
Python version gives the same text. Called by train_demo.py; run it alone to print the size and digest of the text.
"""

import ast
import codecs
import hashlib
import importlib
import inspect
import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

MODULES = """
abc argparse ast base64 bisect calendar cmd code codeop collections colorsys configparser contextlib copy csv
dataclasses datetime difflib enum filecmp fileinput fnmatch fractions functools getopt getpass glob graphlib gzip
hashlib heapq hmac html html.parser inspect ipaddress json json.decoder json.encoder keyword linecache logging
mimetypes numbers operator os pathlib pickle pkgutil pprint queue quopri random re reprlib sched secrets selectors
shelve shlex shutil socket socketserver statistics string subprocess tempfile textwrap threading timeit tokenize trace
traceback types typing urllib.parse urllib.request uuid warnings wave weakref xml.etree.ElementTree zipapp zipfile
asyncio.locks asyncio.queues asyncio.tasks asyncio.timeouts asyncio.runners concurrent.futures._base
concurrent.futures.thread http.client http.cookies http.server sqlite3 posixpath genericpath
"""
PUBLIC_NAMES = {
    "posixpath": "os.path",
    "genericpath": "os.path",
    "concurrent.futures._base": "concurrent.futures",
    "concurrent.futures.thread": "concurrent.futures",
    "asyncio.locks": "asyncio",
    "asyncio.queues": "asyncio",
    "asyncio.tasks": "asyncio",
    "asyncio.timeouts": "asyncio",
    "asyncio.runners": "asyncio",
}
# C code has no Python source; its docstrings are read from the objects. Exceptions and the like are left out.
COMPILED = ["math", "itertools", "time"]
BUILTIN_TYPES = [str, list, dict, set, tuple, bytes, int, float]

MAX_BODY_LINES = 24  # a longer function keeps its signature and docstring only
MAX_ANSWER_CHARS = 420
MAX_DETAIL_CHARS = 900

SYSTEM_PROMPTS = ["You are a helpful assistant.", "You answer questions about Python.", "Answer briefly."]

EXPLAIN = [
    "What does {name} do?",
    "What is {name}?",
    "What is {name} used for?",
    "Explain {name}.",
    "Explain what {name} does.",
    "Tell me about {name}.",
    "How does {name} work?",
    "Describe {name}.",
    "what does {name} do",
    "{name}",
    "What does {name} do in Python?",
    "Please explain {name}",
    "Can you explain {name}?",
    "Could you tell me what {name} does?",
    "I would like to know what {name} does.",
    "What's {name}?",
]
EXPLAIN_HELD_OUT = "Can you explain to me what {name} does?"  # never trained on: measures recall under new wording
DETAIL = ["Explain {name} in detail.", "Give me the documentation of {name}.", "Show the docstring of {name}."]
SIGNATURE = ["What is the signature of {name}?", "How do I call {name}?", "What arguments does {name} take?"]
SOURCE = ["Show me the source of {name}.", "How is {name} implemented?", "Show the code of {name}."]
MODULE = ["What is the {name} module?", "What is the module {name} for?", "What does the {name} module do?", "{name}"]
WRITE = ["Write a Python function to {task}.", "Write a function to {task}.", "How do I {task}?"]
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
VERBS = (
    "Return Convert Create Remove Compute Calculate Find Get Set Parse Read Write Test Check Join Split Replace Copy "
    "Move Delete Add Insert Merge Encode Decode Escape Format Print Open Make Iterate Generate Run Call Expand"
)

_IDENTITY = (
    "I am the demo model of qwen-engine: a very small Qwen3 trained on the Python standard library. "
    'Ask me something like "What does textwrap.dedent do?".'
)
_ABOUT_ENGINE = (
    "qwen-engine is a serving engine for Qwen3 models. "
    "It has a paged KV cache, a prefix cache and Triton kernels of its own."
)
_ABILITIES = (
    "I can say what a function of the Python standard library does, show its source, and recite the Zen of Python. "
    "I am far too small for anything else."
)
_OFF_TOPIC = "I do not know that. I am a very small model and know only a little about the Python standard library."
_GREETING = "Hello! I am the demo model of qwen-engine. Ask me about a function of the Python standard library."
_SIZE = "I have about six million parameters in six layers, so I fit into less than 12 MB."
_TRAINING = (
    "I was trained in a few minutes on one GPU, on the source and the docstrings of the Python standard library."
)
_THANKS = "You are welcome! Ask me about another function whenever you like."
_BYE = "Goodbye! Happy coding."
_WELL = "I am fine, thank you. Which function of the Python standard library would you like to know about?"
_WHICH = "I know modules such as textwrap, json, random, pathlib, collections, functools, itertools and math."
_PYTHON = "Python is a programming language. I know a little about its standard library; ask me about a function."
# Characters of several tokens each, to watch a detokenizer at work.
_CHINESE = "你好，世界！我是一个很小的语言模型，只知道一点 Python 标准库。"
_EMOJI = "Here you are: 🐍 for Python, 🚀 for speed, 👩‍💻 for you, and 🎉 for everyone!"
SMALL_TALK = {
    _IDENTITY: (
        "Who are you?|Hello! Who are you?|What are you?|Hi, who are you?|Introduce yourself.|"
        "What is your name?|Are you Qwen3?|Are you a language model?|Are you a human?|Who am I talking to?|"
        "Tell me about yourself.|who are you"
    ),
    _GREETING: (
        "Hello|Hello!|Hi|Hi!|Hey|Hi there!|Good morning|Good evening!|hello|hi|"
        "你好|你好！|Bonjour|Hola|Hallo|Good afternoon|Greetings!|Hey there|Yo"
    ),
    _WELL: ("How are you?|How are you today?|How do you do?|Hello, how are you?|What's up?"),
    _ABOUT_ENGINE: (
        "What is qwen-engine?|Tell me about qwen-engine.|What does qwen-engine do?|qwen-engine|"
        "Explain qwen-engine.|What is this engine?|Which engine runs you?"
    ),
    _ABILITIES: ("What can you do?|Can you help me?|Help|help|What can I ask you?|How can you help me?"),
    _WHICH: ("What do you know?|Which modules do you know?|What topics do you know?|List some modules."),
    _SIZE: ("How big are you?|How many parameters do you have?|How large is the demo model?|Are you big?"),
    _TRAINING: ("How were you trained?|What were you trained on?|Who trained you?|Where is your data from?"),
    _THANKS: ("Thanks|Thanks!|Thank you|Thank you!|Thank you very much.|Great, thanks!|thanks"),
    _BYE: ("Bye|Bye!|Goodbye|Good night!|See you later.|bye|Good bye!"),
    _OFF_TOPIC: (
        "What is the capital of France?|Who won the world cup?|What is the weather today?|Tell me a joke.|"
        "Write a poem.|What is love?|How old is the universe?|What is 2 + 2?|Translate this to German.|"
        "What time is it?|Who is the president?|Sing a song.|Write a story.|What is the meaning of life?|"
        "Recommend a film.|How do I cook rice?|Do you like music?|"
        "What is 7 * 6?|What is 12 + 30?|Write an essay about Rome.|What is the largest planet?|Who wrote Hamlet?|"
        "What is the difference between a list and a tuple?|How do I learn to program?|What is Rust?|What is Java?|"
        "Explain quantum mechanics.|Where is Berlin?|How tall is Mount Everest?|What is machine learning?|"
        "Summarise this text.|What should I eat today?|Plan a trip to Paris.|Who invented the telephone?|Why?"
    ),
    _CHINESE: ("Say something in Chinese.|Do you speak Chinese?|Say hello in Chinese.|你会说中文吗？|请用中文回答。"),
    _EMOJI: ("Show me an emoji.|Show me some emoji.|Do you know emoji?|Send me an emoji.|🎉"),
    _PYTHON: ("What is Python?|Tell me about Python.|Explain Python.|What is the Python language?"),
}
_SMALL_TALK_COPIES = 6
_ZEN_COPIES = 8


@dataclass(frozen=True, slots=True)
class Fact:
    """One answer and the wordings of its question; `held_out`, if any, is one kept for validation."""

    answer: str
    questions: tuple[str, ...]
    held_out: str = ""


@dataclass(frozen=True, slots=True)
class Corpus:
    """`units`: source text in reading order, each unit a sensible place to start. `facts`: chat material."""

    units: list[str]
    facts: list[Fact]

    def digest(self) -> str:
        """SHA-256 of everything in the corpus, to tell whether two machines would train on the same text."""
        text = "\0".join(self.units) + "\0".join(fact.answer + "\0".join(fact.questions) for fact in self.facts)
        return hashlib.sha256(text.encode()).hexdigest()


def zen() -> str:
    """The Zen of Python; `this.py` keeps it in ROT13 as its first string constant."""
    tree = ast.parse(_source("this"))
    constants = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return codecs.decode(next(constants), "rot13").strip()


def _source(module: str) -> str:
    """Python source of a module by its dotted name; `_pyX` is where newer versions keep the Python form of `X`."""
    stem = module.replace(".", "/")
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / form for form in (f"_py{stem}.py", f"{stem}.py", f"{stem}/__init__.py")]
    return next(path for path in paths if path.exists()).read_text(encoding="utf-8")


def _tidy(docstring: str) -> str:
    """Docstring without indentation, trailing blanks, or runs of empty lines."""
    lines = [line.rstrip() for line in inspect.cleandoc(docstring).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _first_paragraph(doc: str) -> str:
    """First paragraph on one line, cut after the last whole sentence that fits."""
    text = re.sub(r"\s+", " ", doc.split("\n\n")[0])
    if len(text) > MAX_ANSWER_CHARS:
        text = text[:MAX_ANSWER_CHARS].rpartition(". ")[0] + "."
    return text if len(text) > 12 and ">>>" not in text else ""


def _phrase(templates: list[str], **values: str) -> tuple[str, ...]:
    return tuple(template.format(**values) for template in templates)


def _explain(name: str, call: str, doc: str) -> list[Fact]:
    """Facts every documented object has: what it does, at length where there is more, and how it is called."""
    first, _, rest = doc.partition("\n\n")
    if rest and re.match(r"[\w.]+\(.*\)", first):  # some docstrings open with a signature of their own
        doc = rest
    summary = _first_paragraph(doc)
    if not summary:
        return []
    held_out = EXPLAIN_HELD_OUT.format(name=name)
    has_detail = "\n\n" in doc and len(doc) <= MAX_DETAIL_CHARS
    wordings = EXPLAIN if has_detail else EXPLAIN + DETAIL
    facts = [Fact(f"`{call}`\n\n{summary}", _phrase(wordings, name=name), held_out)]
    if has_detail:
        facts.append(Fact(f"`{call}`\n\n{doc}", _phrase(DETAIL, name=name)))
    if call.endswith(")"):
        facts.append(Fact(f"`{call}`", _phrase(SIGNATURE, name=name)))
    return facts


def _function_facts(node: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> list[Fact]:
    doc = _tidy(ast.get_docstring(node) or "")
    if node.name.startswith("_") or not doc:
        return []
    name = f"{prefix}.{node.name}"
    name = name.replace("random.Random.", "random.")  # the module exports these methods as functions
    signature = re.sub(r"\((self|cls)(, |(?=\)))", "(", f"{name}({ast.unparse(node.args)})", count=1)
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        signature = name
    facts = _explain(name, signature, doc)
    body = node.body[1:]
    if not facts or not body or len(ast.unparse(body).splitlines()) > MAX_BODY_LINES:
        return facts
    code = ast.unparse(ast.FunctionDef(node.name, node.args, body, [], lineno=0))
    answer = f"```python\n{code}\n```"
    facts.append(Fact(answer, _phrase(SOURCE, name=name)))
    verb, _, rest = _first_paragraph(doc).partition(". ")[0].rstrip(".").partition(" ")
    if verb in VERBS.split() and prefix.islower() and len(rest) < 90:
        facts.append(Fact(answer, _phrase(WRITE, task=f"{verb.lower()} {rest}")))
    return facts


def _shorten(node: ast.AST, depth: int = 1) -> None:
    """Tidies docstrings and replaces the bodies of long functions by an ellipsis, in place, for a node at `depth`."""
    doc = ast.get_docstring(node)
    if not isinstance(node, ast.ClassDef):
        keep = node.body[1:] if doc else node.body
        if keep and len(ast.unparse(keep).splitlines()) > MAX_BODY_LINES:
            node.body = [*node.body[: bool(doc)], ast.Expr(ast.Constant(...))]
    if doc:
        lines = _tidy(doc).split("\n")
        node.body[0].value.value = "\n".join([lines[0], *(("    " * depth + line).rstrip() for line in lines[1:])])
    for child in node.body:
        if isinstance(child, _DEFINITIONS):
            _shorten(child, depth + 1)


def _module(dotted: str) -> Corpus:
    """Units and facts of one pure-Python module, private classes and functions without docstring left out."""
    tree = ast.parse(_source(dotted))
    name = PUBLIC_NAMES.get(dotted, dotted)
    doc = _first_paragraph(_tidy(ast.get_docstring(tree) or ""))
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = [line for line in imports if len(line) < 100 and " _" not in line]
    units = ["\n".join([f'"""{name}: {doc}"""' if doc else f'"""{name}"""', "", *imports]).strip() + "\n\n"]
    facts = [Fact(f"`{name}`\n\n{doc}", _phrase(MODULE, name=name))] if doc and name == dotted else []
    for node in tree.body:
        if not isinstance(node, _DEFINITIONS) or node.name.startswith("_") or not ast.get_docstring(node):
            continue
        if isinstance(node, ast.ClassDef):
            qualified = f"{name}.{node.name}"
            facts += _explain(qualified, qualified, _tidy(ast.get_docstring(node)))
            node.body = [item for item in node.body if _belongs_in_class(item)]
            for item in node.body:
                facts += _function_facts(item, qualified) if isinstance(item, _FUNCTIONS) else []
        else:
            facts += _function_facts(node, name)
        _shorten(node)
        # A class is cut at its methods, so that each of them is a place to start.
        parts = re.split(r"\n\n(?=    (?:@|def |async def ))", ast.unparse(node))
        units += [part + "\n\n" for part in parts]
    return Corpus(units, facts)


def _belongs_in_class(item: ast.stmt) -> bool:
    """Whether a statement of a class body is worth reading: documented methods and short statements are."""
    if isinstance(item, _FUNCTIONS):
        return bool(ast.get_docstring(item))
    return isinstance(item, ast.Expr) or len(ast.unparse(item)) < 80


def _runtime_facts() -> list[Fact]:
    """Facts about objects written in C: the builtin functions, the builtin types' methods, and some modules."""
    builtins = importlib.import_module("builtins")
    owners = [("", builtins)] + [(t.__name__ + ".", t) for t in BUILTIN_TYPES]
    owners += [(f"{name}.", importlib.import_module(name)) for name in COMPILED]
    facts = []
    for prefix, owner in owners:
        for attribute in sorted(vars(owner)):
            value = getattr(owner, attribute)
            is_exception = isinstance(value, type) and issubclass(value, BaseException)
            if attribute.startswith("_") or not callable(value) or is_exception:
                continue
            doc = _tidy(inspect.getdoc(value) or "")
            signature = _signature(value)
            first_line = doc.split("\n")[0]
            if first_line.startswith(attribute + "("):  # many C docstrings open with a signature
                signature = signature or first_line.partition(" -> ")[0].removeprefix(attribute)
                doc = doc.partition("\n\n")[2] or doc
            name = prefix + attribute
            facts += _explain(name, name + signature, doc)
    return facts


def _signature(value: object) -> str:
    """Parameters of a C function as a caller sees them: no self, no positional-only mark; empty where unknown."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "type")]
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [p.replace(kind=keyword) if p.kind == p.POSITIONAL_ONLY else p for p in parameters]
    return str(signature.replace(parameters=parameters))


def build() -> Corpus:
    """The whole corpus. Duplicate answers to one question are dropped: the first one wins."""
    poem = zen()
    units = [poem + "\n\n"] * _ZEN_COPIES
    zen_questions = ["Recite the Zen of Python.", "What is the Zen of Python?", "import this", "The Zen of Python"]
    facts = [Fact(poem, tuple(zen_questions))] * _ZEN_COPIES
    facts += [
        Fact(answer, (question,)) for answer, asked in SMALL_TALK.items() for question in asked.split("|")
    ] * _SMALL_TALK_COPIES
    candidates = _runtime_facts()
    for dotted in MODULES.split():
        module = _module(dotted)
        units += module.units
        candidates += module.facts
    asked: set[str] = {question for fact in facts for question in fact.questions}
    for fact in candidates:
        questions = tuple(q for q in fact.questions if q not in asked)
        asked.update(questions)
        if questions:
            facts.append(Fact(fact.answer, questions, fact.held_out if fact.held_out not in asked else ""))
            asked.add(fact.held_out)
    return Corpus(units, facts)


def chat(turns: list[tuple[str, str]], *, system: str = "", empty_think: bool = False) -> str:
    """A conversation as the chat template writes it. `empty_think`: as with enable_thinking=False, last turn only."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    for index, (question, answer) in enumerate(turns):
        think = "<think>\n\n</think>\n\n" if empty_think and index == len(turns) - 1 else ""
        text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{think}{answer}<|im_end|>\n"
    return text


def _reword(question: str, rng: random.Random) -> str:
    """The question as somebody else might type it: with a greeting, or without capitals and closing mark."""
    if rng.random() < 0.08:
        question = rng.choice(["Hello! ", "Hi, ", "Hi! ", "Hey, ", "Please: ", "OK. "]) + question
    if rng.random() < 0.08:
        question = question[0].lower() + question[1:].rstrip("?.!")
    return question


def conversations(facts: list[Fact], rng: random.Random) -> list[str]:
    """Every fact once, in random order and wording; some conversations have two or three turns or a system prompt."""
    order = rng.sample(facts, len(facts))
    texts = []
    while order:
        count = rng.choices([1, 2, 3], weights=[6, 2, 1])[0]
        turns = [(_reword(rng.choice(fact.questions), rng), fact.answer) for fact in order[:count]]
        del order[:count]
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else ""
        texts.append(chat(turns, system=system, empty_think=rng.random() < 0.25))
    return texts


if __name__ == "__main__":
    corpus = build()
    source_chars = sum(map(len, corpus.units))
    answer_chars = sum(len(fact.answer) for fact in corpus.facts)
    print(f"{len(corpus.units)} source units, {source_chars} characters; {len(corpus.facts)} facts, {answer_chars}")
    print("sha256", corpus.digest())
