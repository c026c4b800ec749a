"""The chat trainer with torch.compile doing nothing, for a test of what is compiled that cannot wait for it."""
import torch._dynamo

from tests.helpers.students import run_trainer


def train_sft(argv):
    torch._dynamo.config.disable = True
    run_trainer(argv)
