"""Answers of the engine transformers against generate and softmax; the others are asked in test_create_data.py."""
import http.server
import threading

import pytest
import torch

from core.cli import UserError
from distill import teachers
from distill.causal_lm import Draw


def ask_tiny(folder, batch_size=16, max_tokens=12, **sampling):
    """answers(requests) of the model in a folder."""
    draw = teachers.Sampling(max_tokens, **sampling)
    return teachers.open_teacher("transformers", str(folder), draw, batch_size=batch_size)


def request(number, text, seed):
    return teachers.Request(number, [{"role": "user", "content": text}], seed)


def test_transformers_answers_as_generate_does(tiny_chat):
    folder, model, tokenizer = tiny_chat
    requests = [request(i, "a" * (3 * i + 1), i) for i in range(6)]
    found = {asked.id: answer for asked, answer in ask_tiny(folder, max_tokens=4)(requests)}
    for asked in requests:
        text = f"<|im_start|>user\n{asked.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer(text, return_tensors="pt")
        out = model.generate(**prompt, do_sample=False, max_new_tokens=4)[0, prompt["input_ids"].shape[1]:]
        ended = bool(out[-1].item() in model.generation_config.eos_token_id)
        ids, answer = out[:len(out) - ended], found[asked.id]
        assert answer.text == tokenizer.decode(ids) and answer.finish_reason == ("stop" if ended else "length")
        assert answer.prompt_tokens == prompt["input_ids"].shape[1] and answer.completion_tokens == len(out)
    assert {answer.finish_reason for answer in found.values()} == {"stop", "length"}


def test_a_draw_takes_one_number_of_its_row():
    """The token is where the running sum of the probabilities passes it; vocabularies are large."""
    draw, shares = Draw([7, 8]), torch.tensor([0.0, 0.5, 0.25, 0.25])
    found = [draw(None, shares.log().expand(2, 4)).argmax(-1).tolist() for _ in range(40)]
    for row, seed in enumerate((7, 8)):
        numbers = torch.rand(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        wanted = [1 if number < 0.5 else 2 + (number >= 0.75) for number in numbers.tolist()]
        assert [tokens[row] for tokens in found] == wanted
    assert draw(None, torch.full((2, 4), torch.nan)).shape == (2, 4), "the loss finds them"


@pytest.mark.parametrize("status", [301, 307])
def test_a_key_follows_no_redirection(monkeypatch, status):
    """Another address gets neither the key nor the question, and what it would answer is not taken."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    seen = []

    class Redirecting(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.server.server_port, self.headers.get("Authorization")))
            if self.server.server_port == first.server_port:
                self.send_response(status)
                self.send_header("Location", f"http://localhost:{second.server_port}/v1/models")
                self.end_headers()
                return
            body = b'{"data": [{"id": "m"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    first, second = (http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) for _ in range(2))
    for server in (first, second):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{first.server_port}/v1"
    with pytest.raises(UserError, match=f"HTTP {status} "):
        teachers.open_teacher("openai", "m", teachers.Sampling(1), base_url=url)
    assert seen == [(first.server_port, "Bearer sk-secret")]
    for server in (first, second):
        server.shutdown()


@pytest.mark.parametrize("url, key, said", [
    ("http://anna:pa/ss@h/v1", "", "holds a name and password"), ("http://h/v1", "sk-se\ncret", "OPENAI_API_KEY"),
    ("http://[::1/v1", "", "is not an address")])
def test_an_address_or_key_that_is_none_is_not_printed(monkeypatch, url, key, said):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UserError) as error:
        teachers.Server(url, 1.0)
    assert said in str(error.value) and "pa/ss" not in str(error.value) and "cret" not in str(error.value)
