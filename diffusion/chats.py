"""Chats for block diffusion: every trained answer becomes a problem of its own, whose question is all that stands
before it in the chat template.

An answer in the middle of a chat is a document that ends there, since the sampler fills its last block with end tokens,
which no later turn may hold. Ids are those of core/chat.py: the prompt's are proven to be the first of the whole, so
what is trained is what is asked for later. Thinking, where a template knows it, is off.
"""
import re

from common.distributed import UserError
from common.problems import problem, settle
from core import chat
from diffusion.folders import auto_tokenizer
from diffusion.problems import Problem, read_entries

CHUNK = 1024        # lines tokenised together
# advice that names flags of the chat trainer
HINT = re.compile(r"; (so what|give) .*--chat_template.*")


def read(path, folder, tokens, bad):
    """Problems of a chat file or data set, with ids; those of one chat have one name.

    folder: tokenizer with a chat template. tokens: problems.Tokens, whose end token must end the template's answers;
    UserError otherwise. bad: a list that takes what cannot be used (common's problems.Problem).
    """
    encoder, found = encoder_of(folder, "last"), []
    for records, wrong in chat.read_chunks(path, CHUNK):
        bad += [problem(p.name, "invalid", p.what, path) for p in wrong]
        asked = [(f"{path}:{line}", i, record) for line, record in records for i in answers(record["messages"])]
        results = encoder.encode([record["messages"][:i + 1] for _, i, record in asked],
                                 [record.get("tools") for _, _, record in asked])
        for (name, i, _), result in zip(asked, results):
            if isinstance(result, ValueError):
                bad.append(problem(name, "invalid", f"answer in message {i + 1}: {HINT.sub('', str(result))}", path))
                continue
            ids, mask = result
            ids = ids[:len(mask) - mask[::-1].index(True)]
            if ids[-1] != tokens.end:
                ends, wanted = (tokens.tokenizer.id_to_token(number) for number in (ids[-1], tokens.end))
                raise UserError(f"{folder}: its chat template ends answers with {ends}, its end token is {wanted}; "
                                f"give --end_token '{ends}'")
            found.append(Problem(name, "", "", "", ids=ids, given=mask.index(True)))
    if not found and not bad:
        raise UserError(f"{path}: holds no chats")
    return found


def answers(messages):
    """Places of the answers to train; the last one where there is none, for the encoder to say why."""
    found = [i for i, message in enumerate(messages) if message["role"] == "assistant" and message.get("weight", 1)]
    return found or [len(messages) - 1]


def encoder_of(folder, turns="all"):
    """chat.Encoder of a tokenizer folder's chat template. Raises UserError."""
    return chat.Encoder(chat.load_tokenizer(folder, load=auto_tokenizer), turns, thinking=False)


def prompt(name, messages, encoder, tokens, tools=None):
    """Problem without an answer: messages by the template, up to where the answer begins. Raises UserError."""
    try:
        whole = [*messages, {"role": "assistant", "content": "-"}]
        chat.check_messages({"messages": whole, **({"tools": tools} if tools else {})})
        if found := encoder.control.search("".join(message["content"] for message in messages)):
            raise ValueError(f"contains the control token {found[0]}; remove it")
        ids = tokens.encode(encoder.render(messages, True, tools))
    except ValueError as error:
        raise UserError(f"{name}: {HINT.sub('', str(error))}")
    return Problem(name, chat.question(messages), "", "", ids=ids, given=len(ids))


def read_prompts(path, folder, tokens):
    """prompt of each chat of a JSONL or JSON file of {"messages": ...}; an answer at its end is left out. UserError."""
    encoder, found, wrong = encoder_of(folder), [], []
    for name, entry in read_entries(path, ""):
        messages = entry.get("messages") if isinstance(entry, dict) else None
        if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
            messages = messages[:-1] if messages[-1].get("role") == "assistant" else messages
        try:
            if not isinstance(messages, list) or not messages:
                raise UserError(f'{name}: has no list "messages" with something asked')
            found.append(prompt(name, messages, encoder, tokens, entry.get("tools")))
        except UserError as error:
            wrong.append(problem(name, "invalid", str(error).partition(": ")[2], path))
    settle(wrong)
    if not found:
        raise UserError(f"{path}: holds no chats")
    return found
