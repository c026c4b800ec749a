"""Three ways to ask a teacher, behind one function: answers = open_vllm(...), then answers(requests).

answers yields (Request, Answer) in any order. open_vllm, open_server and open_transformers return it:

vllm           vLLM in this process, the GPUs this process sees; equal prompt beginnings are computed once
openai         any server with OpenAI's /chat/completions (vllm serve, SGLang, ...), many requests at once
transformers   generate() of transformers; slow, but runs anywhere

All send one user message through the model's own chat template, and draw from a seed of each request: the answer to a
request does not depend on which others are asked, in which order, or by how many processes (up to rounding of sums).
"""
import http.client
import importlib.util
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

from common import json_files
from common.flags import UserError
from common.text import printable

TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)
NOTICE_S = 10           # seconds between notices of calls that failed
SAID = 2**16            # bytes read of what a server says about an error
PLACE = "{text}"        # where the line goes in the prompt
# what a failed call, or an answer of another form, raises
MALFORMED = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, IndexError, AttributeError)
TOO_LONG = ("context length", "too long", "maximum model length", "max_model_len", "longer than")


@dataclass(frozen=True)
class Request:
    """One question to the teacher."""
    id: int                     # of the line
    prompt: str                 # the user message
    seed: int                   # of the draws
    constraint: dict = None     # {"choice": [str]} or {"regex": str} that the answer must obey


@dataclass
class Answer:
    """What came back. text holds thoughts as well, where the engine hands them out."""
    text: str
    finish_reason: str          # stop: by itself; length: cut off; too_long: the prompt leaves no room
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None        # of the prompt, None: the engine does not say
    thought: bool = False       # the engine has taken closed thoughts out of the text
    tokens: list = field(default_factory=list)      # with --logprobs: [(text, [(text, log-probability), ...])]


@dataclass
class Sampling:
    """How answers are drawn."""
    max_tokens: int             # an answer may have, thoughts included
    temperature: float = 0.0    # 0: always the likeliest token
    top_p: float = 1.0          # draw from the likeliest tokens of this total probability
    top_k: int = 0              # draw from so many tokens, 0: from all
    logprobs: int = 0           # so many alternatives of each token come back
    thinking: str = "default"   # enable_thinking of the chat template: on, off; default: nothing is passed


def pick_engine(engine, base_url):
    """Name of the engine that --engine auto means."""
    if engine != "auto":
        return engine
    if base_url:
        return "openai"
    return "vllm" if importlib.util.find_spec("vllm") else "transformers"


def template_flags(thinking):
    """What the chat template gets beside the messages. thinking: of Sampling."""
    return {} if thinking == "default" else {"enable_thinking": thinking == "on"}


def opens_thought(tokenizer, flags):
    """The text that an answer begins with although the teacher did not write it: the template opens its thoughts."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False,
                                           add_generation_prompt=True, **flags)
    return "<think>" if prompt.rstrip().endswith("<think>") else ""


def read_prompt(path):
    """The prompt as (text before the line, text behind it); other braces in it mean nothing. Raises UserError."""
    parts = json_files.read_text(path, "--prompt_file ").rstrip("\n").split(PLACE)
    if len(parts) != 2:
        raise UserError(f"--prompt_file {path}: has {PLACE} {len(parts) - 1} times; write it once, where the line goes")
    return parts


# ---------------------------------------------------------------------------------------------------------------------
# vLLM


def open_vllm(name, draw, *, tensor_parallel_size=1, pipeline_parallel_size=1, gpu_memory_utilization=0.9,
              max_model_len=0, enforce_eager=False, seed=0):
    """A model folder or hub name in this process. draw: Sampling. max_model_len 0: the model's own."""
    try:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
    except ImportError as error:
        raise UserError(f"--engine vllm: vLLM cannot be imported ({error}); install it, or give --base_url")
    llm = LLM(model=name, tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size,
              gpu_memory_utilization=gpu_memory_utilization, max_model_len=max_model_len or None,
              max_logprobs=max(20, draw.logprobs), enforce_eager=enforce_eager, enable_prefix_caching=True, seed=seed)
    tokenizer, flags = llm.get_tokenizer(), template_flags(draw.thinking)
    need_template(tokenizer, name)
    begin, limit = opens_thought(tokenizer, flags), llm.llm_engine.model_config.max_model_len

    def chat(prompt):
        return [{"role": "user", "content": prompt}]

    def sampling(request):
        constraint = StructuredOutputsParams(**request.constraint) if request.constraint else None
        return SamplingParams(temperature=draw.temperature, top_p=draw.top_p, top_k=draw.top_k, seed=request.seed,
                              max_tokens=draw.max_tokens, logprobs=draw.logprobs or None,
                              structured_outputs=constraint)

    def answers(requests):
        fitting = []
        for request in requests:        # one that does not fit would end the whole call
            ids = tokenizer.apply_chat_template(chat(request.prompt), add_generation_prompt=True, return_dict=False,
                                                **flags)
            if len(ids) >= limit:
                yield request, Answer("", "too_long", len(ids))
            else:
                fitting.append(request)
        outputs = llm.chat([chat(request.prompt) for request in fitting], [sampling(r) for r in fitting],
                           use_tqdm=False, chat_template_kwargs=flags or None) if fitting else []
        for request, out in zip(fitting, outputs):
            best = out.outputs[0]
            tokens = [(row[i].decoded_token, [(alternative.decoded_token, alternative.logprob) for alternative in
                                              sorted(row.values(), key=lambda a: a.rank)[:draw.logprobs]])
                      for i, row in zip(best.token_ids, best.logprobs or [])]
            yield request, Answer(begin + best.text, best.finish_reason, len(out.prompt_token_ids),
                                  len(best.token_ids), out.num_cached_tokens, tokens=tokens)
    return answers


# ---------------------------------------------------------------------------------------------------------------------
# A server


def open_server(name, draw, base_url, concurrency=64, timeout=600.0, patience=600.0):
    """A server that knows the model as `name`; `concurrency` requests are under way at once. draw: Sampling.

    timeout: seconds of silence in one request; patience: seconds that one line's failed requests are repeated. Raises
    UserError when the server, or the model, is not there.
    """
    url = base_url.rstrip("/")
    try:
        models = [str(model["id"]) for model in call(url + "/models", None, timeout)["data"]]
    except MALFORMED as error:
        raise UserError(f"--base_url {base_url}: {explain(error)}; start the server, or mend the address "
                        "(it mostly ends in /v1)")
    if name not in models:
        raise UserError(f"--model_name {name}: the server has {', '.join(models) or 'no models'}")

    todo, done = queue.SimpleQueue(), queue.SimpleQueue()

    def work():
        while True:
            request = todo.get()
            try:
                done.put((request, ask_server(name, draw, url, request, timeout, patience)))
            except Exception as error:      # raised in the main thread, which ends the run
                done.put((request, error))
    for _ in range(concurrency):            # daemons: a thread that waits for the server must not delay the end
        threading.Thread(target=work, daemon=True).start()

    def answers(requests):
        for request in requests:
            todo.put(request)
        for _ in requests:
            request, answer = done.get()
            if isinstance(answer, Exception):
                raise answer
            yield request, answer
    return answers


def ask_server(name, draw, url, request, timeout, patience):
    """Answer to one request; UserError. What may fail only for a while is tried again for `patience` seconds."""
    body = {"model": name, "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": draw.max_tokens, "temperature": draw.temperature, "top_p": draw.top_p, "seed": request.seed}
    if draw.top_k:
        body["top_k"] = draw.top_k
    if flags := template_flags(draw.thinking):
        body["chat_template_kwargs"] = flags
    if draw.logprobs:
        body |= {"logprobs": True, "top_logprobs": draw.logprobs}
    if request.constraint:
        body["structured_outputs"] = request.constraint
    end, pause = time.monotonic() + patience, 0.5
    while True:
        try:
            return read_answer(call(url + "/chat/completions", body, timeout))
        except urllib.error.HTTPError as error:
            why, pause_asked = explain(error), error.headers.get("Retry-After", "")
            if error.code in (400, 413) and any(words in why.lower() for words in TOO_LONG):
                return Answer(why, "too_long")
            if error.code not in TRANSIENT:
                raise UserError(f"line {request.id + 1}: the server at {url} refuses it: {why}")
            pause = max(pause, float(pause_asked) if pause_asked.isdecimal() else 0)
        except MALFORMED as error:
            why = explain(error)
        if time.monotonic() + pause > end:
            raise UserError(f"line {request.id + 1}: no answer from {url} in {patience:g} s: "
                            f"{why}; what is finished is kept, the same command goes on")
        tell(f"notice     line {request.id + 1} waits for {url}: {why}")
        time.sleep(pause)
        pause = min(2 * pause, 30)


def tell(message, told=[float("-inf")]):        # noqa: B006  the time of the last one, of all threads
    """Print a notice, at most one in NOTICE_S: a server that is down fails for every line."""
    if time.monotonic() - told[0] > NOTICE_S:
        told[0] = time.monotonic()
        print(printable(message))


def call(url, body, timeout):
    """GET, or POST of a JSON body; the JSON that comes back. OPENAI_API_KEY is sent where it is set."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as response:
        return json_files.loads(response.read(json_files.LONGEST))


def explain(error):
    """A failed call in a few words; for an HTTP error what the server says about it."""
    if isinstance(error, urllib.error.HTTPError):
        try:
            text = error.read(SAID).decode("utf-8", "replace")
            found = json_files.loads(text)
            found = found.get("error", found)
            text = found["message"] if isinstance(found, dict) and "message" in found else str(found)
        except (ValueError, AttributeError, OSError, http.client.HTTPException):
            text = error.reason
        return f"HTTP {error.code} {printable(' '.join(str(text).split()), 200)}"
    if isinstance(error, (OSError, http.client.HTTPException)):
        return str(getattr(error, "reason", None) or error or type(error).__name__)
    return f"its answer is not what OpenAI's API gives ({type(error).__name__} {str(error)[:80]})"


def read_answer(found):
    """Answer from the JSON of /chat/completions; one of MALFORMED where it has another form."""
    choice, usage = found["choices"][0], found.get("usage") or {}
    message, details = choice["message"], usage.get("prompt_tokens_details") or {}
    rows = (choice.get("logprobs") or {}).get("content") or []
    tokens = [(row["token"], [(top["token"], top["logprob"]) for top in row["top_logprobs"]]) for row in rows]
    text = json_files.HALF_CHARACTER.sub("\ufffd", message["content"] or "")       # no file can hold halves
    return Answer(text, choice["finish_reason"], usage.get("prompt_tokens", 0),
                  usage.get("completion_tokens", 0), details.get("cached_tokens"),
                  bool(message.get("reasoning_content") or message.get("reasoning")), tokens)


# ---------------------------------------------------------------------------------------------------------------------
# transformers


def open_transformers(name, draw, max_model_len=0, batch_size=16):
    """A model folder or hub name on the GPU, or the CPU where there is none. draw: Sampling.

    max_model_len 0: the model's own. batch_size: lines generated together.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper  # isort: skip
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()
    except (OSError, ValueError) as error:
        raise UserError(f"--model_name {name}: cannot be loaded ({str(error).splitlines()[0][:200]}); give "
                        "a folder, or a hub name when online")
    need_template(tokenizer, name)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends if ends is not None else tokenizer.eos_token_id]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    flags = template_flags(draw.thinking)
    begin = opens_thought(tokenizer, flags)
    limit = max_model_len or getattr(model.config, "max_position_embeddings", None) or 1 << 30

    class Draw(LogitsProcessor):
        """Adds Gumbel noise of each row's own generator: the largest value is then a draw from the softmax."""
        def __init__(self, seeds):
            self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

        def __call__(self, input_ids, scores):
            noise = torch.stack([torch.rand(scores.shape[1], generator=generator) for generator in self.generators])
            return scores - torch.log(-torch.log(noise.clamp(1e-20, 1 - 1e-7))).to(scores.device)

    def draw_like(seeds):
        if not draw.temperature:
            return LogitsProcessorList()
        kept = [TopKLogitsWarper(draw.top_k)] if draw.top_k else []
        kept += [TopPLogitsWarper(draw.top_p)] if draw.top_p < 1 else []
        return LogitsProcessorList([TemperatureLogitsWarper(draw.temperature), *kept, Draw(seeds)])

    def answers(requests):
        prompts = [(request, tokenizer.apply_chat_template([{"role": "user", "content": request.prompt}],
                                                           add_generation_prompt=True, return_dict=False, **flags))
                   for request in requests]
        fitting = []
        for request, ids in prompts:
            if len(ids) + draw.max_tokens > limit:
                yield request, Answer("", "too_long", len(ids))
            else:
                fitting.append((request, ids))
        fitting.sort(key=lambda pair: len(pair[1]))         # less padding
        for i in range(0, len(fitting), batch_size):
            yield from generate(fitting[i:i + batch_size])

    @torch.inference_mode()
    def generate(batch):
        inputs = tokenizer.pad({"input_ids": [ids for _, ids in batch]}, return_tensors="pt").to(device)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=draw.max_tokens, eos_token_id=ends,
                             pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=True,
                             output_logits=bool(draw.logprobs), temperature=None, top_p=None, top_k=None,
                             logits_processor=draw_like([request.seed for request, _ in batch]))
        found = []
        for row, (request, ids) in enumerate(batch):
            new = out.sequences[row, inputs["input_ids"].shape[1]:].tolist()
            stop = next((i for i, token in enumerate(new) if token in ends), None)
            answer, tokens = new[:stop], []
            for i, token in enumerate(answer if draw.logprobs else []):
                top = torch.log_softmax(out.logits[i][row].float(), -1).topk(draw.logprobs)
                tokens.append((tokenizer.decode([token]), [(tokenizer.decode([other]), value) for other, value in
                                                           zip(top.indices.tolist(), top.values.tolist())]))
            text = begin + tokenizer.decode(answer, skip_special_tokens=False)
            found.append((request, Answer(text, "length" if stop is None else "stop", len(ids), len(answer),
                                          tokens=tokens)))
        return found
    return answers


def need_template(tokenizer, name):
    """Raw prompts are not what a chat model was trained on: without a chat template most answers cannot be read."""
    if not tokenizer.chat_template:
        raise UserError(f"--model_name {name}: its tokenizer has no chat template; take a chat model")
