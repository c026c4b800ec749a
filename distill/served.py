"""The student's own answers from vLLM's server, whose adapters are replaced as training goes on.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE --enable-lora --max-lora-rank 32

The adapters of a step are written to a folder that the server can read, and loaded under a name of their own: what a
server has cached of a prompt belongs to a name, and would be used again with other weights. Prompts go there and
answers come back as ids: a text has several, and only those that were drawn have the student's probabilities.
"""
import os
import shutil
import time
import uuid
from pathlib import Path

from common import checkpoint, distributed, tensor_files
from common.distributed import UserError
from core import adapters
from distill.teacher_server import NOT_SET, Server

# the draw is from the softmax, whatever the model's generation_config says
SOFTMAX = {**NOT_SET, "temperature": 1.0, "top_p": 1.0}


def opened(world, base_url, output_dir, every, timeout):
    """Sampler of the server at base_url, of all ranks. every, timeout: of Sampler."""
    sampler = Sampler(world, base_url, Path(os.path.abspath(output_dir)) / "served", every, timeout)
    sampler.run = distributed.rank0_first(world, sampler.begin)
    return sampler


class Sampler:
    """draw(prompts, seeds, limits, ends) asks the server for answers by the adapters of the last refresh(...).

    The adapters of the last refresh stay loaded, and in their folder.
    """

    def __init__(self, world, base_url, folder, every, timeout):
        """folder: for adapters, on a disk that the server sees. every: steps between refreshes. timeout: seconds that a
        call may take, and its repetitions again.
        """
        self.world, self.server = world, Server(base_url, timeout)
        self.folder, self.every = folder, every
        self.run, self.name = "", None

    def begin(self):
        """Name of this run on the server, which answers; what a run before has left in the folder is deleted."""
        self.call("/models")
        self.folder.mkdir(exist_ok=True)
        checkpoint.remove_named(self.folder, r"student-[0-9a-f]{8}-\d+")       # as refresh() names them
        return uuid.uuid4().hex[:8]

    def call(self, path, body=None, text=False, end=None):
        """The server's answer, of Server.insist."""
        return self.server.insist(path, body, text, "; it needs --enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, a "
                                  "--max-lora-rank of at least --lora_rank, and to read --output_dir"
                                  if "lora" in path else "", end)

    def refresh(self, model, step):
        """Have the server answer by a PackedLM's adapters as they are now, if it is time. On every rank at once."""
        if self.name and step % self.every:
            return
        distributed.reshard(model)
        files = tensor_files.stage(self.world, "adapter_model", adapters.adapter_weights(model.net), spread=False)
        before, name = self.name, f"student-{self.run}-{step}"

        def load():
            folder = self.folder / name
            folder.mkdir()
            adapters.save_config(model.net, folder)
            for file, write in files.items():
                write(folder / file)
            end = time.monotonic() + 2 * self.server.timeout        # of both: the other ranks wait
            self.call("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, True,
                      end)
            if before:
                self.call("/unload_lora_adapter", {"lora_name": before}, True, end)
                shutil.rmtree(self.folder / before, ignore_errors=True)
        distributed.rank0_first(self.world, load)
        self.name = name

    def draw(self, prompts, seeds, limits, ends):
        """[ids] of an answer to each prompt (ids), the token that ends it included, of at most limits[i] tokens."""
        def ask(job, end):
            prompt, seed, limit = job
            found = self.call("/completions", {
                **SOFTMAX, "model": self.name, "prompt": [int(token) for token in prompt], "max_tokens": limit,
                "seed": seed,
                "stop_token_ids": [int(token) for token in ends], "ignore_eos": True,       # `ends` alone end an answer
                "return_token_ids": True, "skip_special_tokens": False}, end=end)
            choice = found["choices"][0] if isinstance(found, dict) and found.get("choices") else {}
            ids = choice.get("token_ids")
            if not isinstance(ids, list) or not 0 < len(ids) <= limit or not all(type(token) is int for token in ids):
                raise UserError(f"--base_url {self.server.url}/completions: gave no token_ids of 1 to {limit} tokens; "
                                "vLLM's server does")
            return ids
        return self.server.each(ask, zip(prompts, seeds, limits))
