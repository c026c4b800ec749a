"""Ways to ask a teacher, behind one function: answers = open_...(...), then answers(take).

take(n) gives up to n Requests that are still to be asked, none when there are no more for now.
answers yields (Request, Answer) in any order; whoever reads them may put a request back before the
next one is read. Each engine has a file of its own, which is imported where it is used:

vllm           teacher_vllm.py: in this process; equal prompt beginnings are computed once
openai         teacher_server.py: any server with OpenAI's /chat/completions, many requests at once
transformers   teacher_transformers.py: generate() of transformers; slow, but runs anywhere

All send messages through the model's own chat template, and draw from a seed of each request: the
answer to a request does not depend on which others are asked, in which order, or by how many
processes (up to rounding of sums).
"""
import importlib.util
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from common.flags import need
from core import json_files

PLACE = "{text}"        # where the line goes in the prompt


@dataclass(frozen=True)
class Request:
    """One question to the teacher."""
    id: int                     # of the line
    messages: list              # as OpenAI's API has them, the teacher's prompt among them
    seed: int                   # of the draws
    constraint: dict = None     # {"choice": [str]} or {"regex": str} that the answer must obey


@dataclass
class Answer:
    """What came back. text holds thoughts as well, where the engine leaves them there."""
    text: str
    # stop: by itself; length: cut off; too_long: the prompt leaves no room; refused, no_answer:
    # text says why
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None        # of the prompt, None: the engine does not say
    reasoning: str = ""         # closed thoughts that the engine has taken out of the text
    # with --logprobs: [(text, [(text, log-probability), ...])]
    tokens: list = field(default_factory=list)


@dataclass
class Sampling:
    """How answers are drawn."""
    max_tokens: int             # an answer may have, thoughts included
    temperature: float = 0.0    # 0: always the likeliest token
    top_p: float = 1.0          # draw from the likeliest tokens of this total probability
    top_k: int = 0              # draw from so many tokens, 0: from all
    logprobs: int = 0           # so many alternatives of each token come back
    # enable_thinking of the chat template: on, off; default: nothing is passed
    thinking: str = "default"

    @property
    def template_flags(self):
        """What the chat template gets beside the messages."""
        return {} if self.thinking == "default" else {"enable_thinking": self.thinking == "on"}


def pick_engine(engine, base_url):
    """Name of the engine that --engine auto means."""
    if engine != "auto":
        return engine
    if base_url:
        return "openai"
    return "vllm" if importlib.util.find_spec("vllm") else "transformers"


def taker(requests):
    """take of a list of requests, for `answers`."""
    waiting = deque(requests)
    return lambda n: [waiting.popleft() for _ in range(min(n, len(waiting)))]


def ask(answers, chats):
    """[Answer] to conversations, in their order; for greedy ones, or where every seed may be 0."""
    requests = [Request(number, messages, 0) for number, messages in enumerate(chats)]
    found = {request.id: answer for request, answer in answers(taker(requests))}
    return [found[number] for number in range(len(chats))]


def evaluated(p, max_new_tokens):
    """Flags of both evaluations; max_new_tokens: a default."""
    add = p.add_argument
    add("--model_path", help="base model the run started from (default: what the run's flags say)")
    add("--output_dir", required=True, help="everything written goes here")
    add("--max_new_tokens", type=int, default=max_new_tokens, help="tokens an answer may have")
    add("--batch_size", type=int, default=16, help="answers generated together by transformers")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="to compute in; auto: bfloat16 on a GPU that has it, else float32 (vllm: its own "
             "choice)")
    add("--device", help="where the models run (default: the GPU if there is one)")


# --------------------------------------------------------------------------------------------------
# The teacher's prompt


class Prompt(NamedTuple):
    """role user: text around the last user message; system: a message of its own; none: nothing."""
    role: str
    before: str
    after: str = ""


def read_prompt(path, role="user"):
    """Prompt of a file; other braces in it than PLACE mean nothing. Raises UserError."""
    text = json_files.read_text(path, "--prompt_file ").rstrip("\n")
    parts = text.split(PLACE)
    if role == "system":
        need(text.strip(), f"--prompt_file {path}: is empty")
        need(len(parts) == 1,
             f"--prompt_file {path}: has {PLACE}, which --prompt_role system does not fill in")
        return Prompt(role, text)
    other = ", or give --prompt_role system" if len(parts) == 1 else ""
    need(len(parts) == 2, f"--prompt_file {path}: has {PLACE} {len(parts) - 1} times; write it "
                          f"once, where the line goes{other}")
    return Prompt(role, *parts)


def with_prompt(prompt, messages):
    """The messages as the teacher gets them; a conversation's own system message comes behind the
    prompt in the same one. ValueError when there is no message of the user at the end that a prompt
    could go around.
    """
    if prompt.role == "none":
        return list(messages)
    if prompt.role == "system":
        if messages and messages[0]["role"] in ("system", "developer"):
            first, *rest = messages
            return [first | {"content": f"{prompt.before}\n\n{first['content']}"}, *rest]
        return [{"role": "system", "content": prompt.before}, *messages]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("has no message of the user before its last answer, around which "
                         "--prompt_role user could go")
    text = prompt.before + messages[-1]["content"] + prompt.after
    return [*messages[:-1], {**messages[-1], "content": text}]


# --------------------------------------------------------------------------------------------------
# What the engines of this process share


def opens_thought(tokenizer, flags):
    """What an answer begins with that no teacher wrote: a thought that the template opens."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False,
                                           add_generation_prompt=True, **flags)
    return "<think>" if prompt.rstrip().endswith("<think>") else ""


def need_template(tokenizer, name):
    """UserError without a chat template: a chat model was not trained on raw prompts, and most of
    its answers could not be read.
    """
    need(tokenizer.chat_template,
         f"--model_name {name}: its tokenizer has no chat template; take a chat model")


def fitting(requests, tokenizer, flags, limit):
    """([(request, ids of its prompt)] of at most `limit` tokens, [(request, Answer)] of the rest).
    """
    fits, rest = [], []
    for request in requests:
        ids = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True,
                                            return_dict=False, **flags)
        if len(ids) > limit:
            rest.append((request, Answer("", "too_long", len(ids))))
        else:
            fits.append((request, ids))
    return fits, rest
