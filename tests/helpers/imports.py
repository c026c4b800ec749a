"""Imports of a run of train_v2_ddp.py, done once before ranks are forked, and sources that core/kernels.py reads."""
import functools
import importlib
import inspect

import data  # noqa: F401
from core import adapters, checkpoint, dist, kernels, metrics, optim, packing, run  # noqa: F401
from speech import v2, weights  # noqa: F401

inspect.findsource = functools.cache(inspect.findsource)    # it parses a whole file for each class
for name in ("higgs_audio_v2", "qwen3", "llama"):
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    for kind in vars(module).values():
        if inspect.isclass(kind) and kind.__module__ == module.__name__:
            inspect.findsource(kind)
